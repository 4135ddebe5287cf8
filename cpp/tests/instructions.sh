# instructions.sh OBJDUMP forbid=REGEX require=WORDS OBJECT...: fails when an object contains an
# instruction that the extended regular expression matches (empty: none does), or all of them
# together lack one of the words.
set -eu
objdump=$1 forbid=${2#forbid=} require=${3#require=}
shift 3
[ $# -gt 0 ]
found=$("$objdump" -d --no-show-raw-insn "$@" | awk 'NF > 1 && $1 ~ /:$/ { print $2 }' | sort -u)
[ -n "$found" ]  # else objdump has failed
if [ -n "$forbid" ] && wrong=$(printf '%s\n' "$found" | grep -E "$forbid"); then
  printf 'instructions of another set:\n%s\n' "$wrong"
  exit 1
fi
for instruction in $require; do
  printf '%s\n' "$found" | grep -qx "$instruction" || { echo "no $instruction"; exit 1; }
done

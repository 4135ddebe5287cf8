# instructions.sh OBJDUMP FORBIDDEN REQUIRED OBJECT...: fails when an object contains an instruction
# that the regular expression FORBIDDEN matches, or all of them together lack one of the words in
# REQUIRED.
set -eu
objdump=$1 forbidden=$2 required=$3
shift 3
[ $# -gt 0 ]
found=$("$objdump" -d --no-show-raw-insn "$@" | awk 'NF > 1 && $1 ~ /:$/ { print $2 }' | sort -u)
if wrong=$(printf '%s\n' "$found" | grep -E "$forbidden"); then
  printf 'instructions of another set:\n%s\n' "$wrong"
  exit 1
fi
for instruction in $required; do
  printf '%s\n' "$found" | grep -qx "$instruction" || { echo "no $instruction"; exit 1; }
done

# no_weak_symbols.sh NM OBJECT...: fails when an object defines a weak symbol. The linker keeps one of
# several equal weak symbols, so a CPU without AVX-512 could be handed AVX-512 code.
# DW.ref.* are pointers to the compiler's own exception handling: data, the same in every object.
set -eu
nm=$1
shift
[ $# -gt 0 ]
symbols=$("$nm" -C "$@")
weak=$(printf '%s\n' "$symbols" | grep -E ' [WVu] ' | grep -v ' DW\.ref\.') || true
if [ -n "$weak" ]; then
  printf 'weak symbols leave these objects:\n%s\n' "$weak"
  exit 1
fi

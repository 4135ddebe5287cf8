"""Translate kernels from PTX, as nvcc writes it, to C++ that the emulation runs.

    python translate.py KERNELS.ptx KERNELS.cpp

Of the instructions those that the kernels hold, and an error for any other. What a line of PTX does
is written down here and in ptx.hpp from the PTX ISA, and not from the kernels' source: the twins of
inline assembly there and the compiler's work are what this is to check.
"""

import pathlib
import re
import sys

REGISTERS = {"p": "bool", "rs": "u16", "r": "u32", "rd": "u64", "f": "f32", "fd": "f64"}
CPP_TYPES = {"pred": "bool", "b8": "u8", "b16": "u16", "b32": "u32", "b64": "u64"}
SPECIAL = {"%tid.x": "threadIdx.x", "%ctaid.x": "blockIdx.x", "%ntid.x": "blockDim.x"}
SPECIAL["%nctaid.x"] = "gridDim.x"
COMPARE = dict(eq="==", ne="!=", lt="<", le="<=", gt=">", ge=">=", lo="<", ls="<=", hi=">", hs=">=")
ENTRY = r"\.entry\s+(\w+)\((.*?)\)\s*(?:\.\w+[^\n]*\n)*\{\n(.*?)\n\}\n"
# A half that nobody wants, an address on its way to a generic one, and whether a product is added.
NAMED = {"%temp": ("temp", "u32"), "%tmp": ("tmp", "u64"), "%add": ("add", "bool")}
REGISTER = re.compile(r"%(p|rs|rd|r|fd|f)(\d+)")


class Kernel:
    """Of one entry: its lines of C++ and the registers that they name."""

    def __init__(self, name, body):
        self.name, self.registers, self.lines = name, {}, []
        for line in statements(body):
            if line in "{}":  # of inline assembly
                self.lines.append(line)
            elif line.endswith(":"):
                self.lines.append(f"{label(line[:-1])}:;")
            elif not line.startswith("."):
                self.lines.append(self.predicated(line))

    def predicated(self, line):
        match = re.match(r"@(!?)(%p\d+)\s+(.*)", line)
        if not match:
            return self.instruction(line)
        return f"if ({match[1]}{self.value(match[2], 'pred')}) {{ {self.instruction(match[3])} }}"

    def register(self, text):
        """The C++ name and type of a register, or None."""
        if text in NAMED:
            name, kind = NAMED[text]
            self.registers[name] = kind
            return name, kind
        match = REGISTER.fullmatch(text)
        if match is None:
            return None
        name = f"{match[1]}_{match[2]}"
        self.registers[name] = REGISTERS[match[1]]
        return name, REGISTERS[match[1]]

    def value(self, text, kind):
        """An operand as a C++ expression of an instruction's type: u32, s64, b16, f32, pred."""
        wanted = CPP_TYPES.get(kind, kind)
        if text in SPECIAL:
            return f"{wanted}({SPECIAL[text]})"
        found = self.register(text)
        if found is None:
            return immediate(text, wanted)
        name, held = found
        if held == wanted:
            return name
        if (held[0] == "f") != (wanted[0] == "f"):
            return f"bits_as<{wanted}>({name})"
        return f"{wanted}({name})"

    def assign(self, text, kind, expression):
        """To a register what has the type of an instruction."""
        if text == "_":
            return f"(void)({expression});"
        name, held = self.register(text)
        if (held[0] == "f") != (kind[0] == "f"):
            return f"{name} = bits_as<{held}>({expression});"
        return f"{name} = {held}({expression});"

    def address(self, text):
        """[register + number], [parameter + number] or [shared memory + number]."""
        base, _, offset = text.strip("[]").partition("+")
        offset = offset or "0"
        found = self.register(base)
        if found:
            return found[0], offset
        if "_param_" in base:
            return f"u64(parameters[{base.rsplit('_', 1)[1]}])", offset
        if base.endswith("6memoryE"):
            return "u32(kSharedBase)", offset
        raise ValueError(f"no address: {text}")

    def move(self, op, parts, operands):
        """ld and st, of one number or of several."""
        space = "shared" if "shared" in parts else "param" if "param" in parts else "global"
        kind = CPP_TYPES.get(parts[-1], parts[-1])
        registers, place = operands if op == "ld" else operands[::-1]
        registers = [x.strip() for x in registers.strip("{}").split(",")]
        base, offset = self.address(place)
        number = len(registers)
        pointer = f"{space}_at<{kind}, {number}>({base}, {offset})"
        if op == "ld":
            assigned = (self.assign(x, kind, f"at[{i}]") for i, x in enumerate(registers))
            return f"{{ auto at = {pointer}.copy(); {' '.join(assigned)} }}"
        values = ", ".join(self.value(x, kind) for x in registers)
        return f"{pointer}.store({{{values}}});"

    def atomic(self, op, parts, operands):
        """Of integers in shared memory: threads of a block run one after the other."""
        if parts[:2] != ["shared", "add"] or parts[2] not in ("u32", "s32"):
            raise ValueError(parts)
        to = operands[0] if op == "atom" else "_"
        place, value = operands[-2:]
        base, offset = self.address(place)
        return (
            f"{{ auto at = shared_at<u32, 1>({base}, {offset}); const u32 old = at.copy()[0]; "
            f"at.store({{old + {self.value(value, 'u32')}}}); {self.assign(to, 'u32', 'old')} }}"
        )

    def instruction(self, line):
        opcode, _, rest = line.partition(" ")
        op, *parts = opcode.split(".")
        operands = split_operands(rest)
        try:
            return self.translated(op, parts, operands)
        except (KeyError, ValueError, AttributeError, TypeError) as error:
            raise SystemExit(f"{self.name}: no translation of: {line} ({error!r})") from error

    def translated(self, op, parts, operands):
        kind = parts[-1] if parts else ""
        signed = kind.replace("u", "s")
        unsigned = kind.replace("s", "u").replace("b", "u")

        def given(number, kind=kind):
            return self.value(operands[number], kind)

        def result(expression, kind=kind):
            return self.assign(operands[0], kind, expression)

        if op in ("ld", "st"):
            return self.move(op, parts, operands)
        if op == "bra":
            return f"goto {label(operands[0])};"
        if op == "ret":
            return "return;"
        if op == "cvta":
            return result(given(1, "u64"), "u64")
        if op == "mov":
            return self.moved(kind, operands)
        if op in ("add", "sub", "mul") and parts[0] not in ("hi", "wide"):
            sign = {"add": "+", "sub": "-", "mul": "*"}[op]
            if parts[0] == "rz":
                return result(f"toward_zero(f64({given(1)}) {sign} f64({given(2)}))")
            if kind[0] == "f":
                return result(f"{given(1)} {sign} {given(2)}")
            kind = unsigned
            return result(f"{kind}({given(1, kind)} {sign} {given(2, kind)})", kind)
        if op == "mul":
            if parts[0] == "hi":
                return result(f"upper_half({given(1)}, {given(2)})")
            wide = kind[0] + str(2 * int(kind[1:]))
            return result(f"{wide}({given(1)}) * {wide}({given(2)})", wide)
        if op == "mad" and parts[0] == "lo":
            factors = f"{given(1, unsigned)} * {given(2, unsigned)}"
            return result(f"{factors} + {given(3, unsigned)}", unsigned)
        if op == "fma":
            if parts[0] == "rm":
                return result(
                    f"downward(std::fma({', '.join(given(i, 'f64') for i in (1, 2, 3))}))"
                )
            return result(f"std::fma({given(1)}, {given(2)}, {given(3)})")
        if op == "div" and kind[0] == "f":
            return result(f"{given(1)} / {given(2)}")
        if op in ("div", "rem"):
            return result(f"{'quotient' if op == 'div' else 'remainder'}({given(1)}, {given(2)})")
        if op in ("min", "max"):
            name = {"min": "least_of", "max": "largest_of"}[op]
            return result(f"{name}({given(1)}, {given(2)})")
        if op in ("neg", "abs", "not"):
            if op == "abs":
                return result(f"std::fabs({given(1)})")
            if op == "not":
                return result(f"!{given(1)}" if kind == "pred" else f"~{given(1)}")
            kind = kind if kind[0] == "f" else unsigned
            return result(f"-{given(1, kind)}", kind)
        if op in ("and", "or", "xor"):
            return result(
                f"{given(1)} {dict(zip(('and', 'or', 'xor'), '&|^', strict=True))[op]} {given(2)}"
            )
        if op == "shl":
            return result(f"shifted_left({given(1)}, {given(2, 'u32')})")
        if op == "shr":
            kind = signed if kind[0] == "s" else unsigned
            return result(f"shifted_right({given(1, kind)}, {given(2, 'u32')})", kind)
        if op == "shf" and parts[:2] == ["l", "wrap"]:
            return result(f"funnel_left({', '.join(given(i) for i in (1, 2, 3))})")
        if op == "prmt":
            return result(f"permuted({', '.join(given(i) for i in (1, 2, 3))})")
        if op == "bfi":
            numbers = given(3, "u32"), given(4, "u32")
            return result(f"inserted({given(1)}, {given(2)}, {', '.join(numbers)})")
        if op == "popc":
            return result(f"__builtin_popcount({given(1)})", "u32")
        if op == "sqrt":
            return result(f"std::sqrt({given(1)})")
        if op == "rcp":
            return result(f"1 / {given(1)}")
        if op == "ex2":
            return result(f"std::exp2({given(1)})")
        if op == "selp":
            return result(f"{given(3, 'pred')} ? {given(1)} : {given(2)}")
        if op == "setp":
            return result(self.compared(parts, given(1), given(2), kind), "pred")
        if op == "cvt":
            return self.converted(parts, operands)
        if op == "bar":
            if parts == ["warp", "sync"]:
                return "whole_warp(u32(-1)); emulation::synchronize_warp();"
            return "emulation::synchronize_block();"
        if op == "shfl":
            operands[0], _, _ = operands[0].partition("|")
            lane = f"{given(2, 'u32')}" if parts[1] == "idx" else f"lane() ^ {given(2, 'u32')}"
            if parts[1] not in ("idx", "bfly"):
                raise ValueError(parts[1])
            return f"whole_warp({given(4, 'u32')}); whole_segment({given(3, 'u32')}); " + result(
                f"emulation::exchange({given(1)}, ({lane}) & 31)", "u32"
            )
        if op in ("atom", "red"):
            return self.atomic(op, parts, operands)
        if op == "vote" and parts[1] == "ballot":
            return f"whole_warp({given(2, 'u32')}); " + result(
                f"emulation::ballot({given(1, 'pred')})", "u32"
            )
        if op == "match" and parts[0] == "any":
            return f"whole_warp({given(2, 'u32')}); " + result(f"matching({given(1)})", "u32")
        if op == "cp":
            return self.copied(parts, operands)
        if op in ("mma", "ldmatrix", "movmatrix"):
            return self.matrix(op, parts, operands)
        if op == "wgmma":
            return self.group_product(parts, operands)
        if op == "fence" and parts == ["proxy", "async", "shared::cta"]:
            return ";"  # what is written is there at once
        raise ValueError(op)

    def moved(self, kind, operands):
        to, source = operands
        if source.startswith("{") or to.startswith("{"):  # halves, the lower first
            packed = source if to.startswith("{") else to
            halves = (to if to.startswith("{") else source).strip("{}").split(",")
            low, high = (x.strip() for x in halves)
            half = f"u{int(kind[1:]) // 2}"
            whole = f"u{kind[1:]}"
            if to.startswith("{"):
                value = self.value(packed, whole)
                return self.assign(low, half, f"{half}({value})") + self.assign(
                    high, half, f"{half}({value} >> {int(kind[1:]) // 2})"
                )
            values = self.value(high, half), self.value(low, half)
            shift = int(kind[1:]) // 2
            return self.assign(to, whole, f"{whole}({values[0]}) << {shift} | {values[1]}")
        if "_param_" in source or source.endswith("6memoryE"):
            base, offset = self.address(f"[{source}]")
            return self.assign(to, "u64", f"u64({base}) + {offset}")
        return self.assign(to, kind, self.value(source, kind))

    def compared(self, parts, a, b, kind):
        word = parts[0]
        if len(parts) != 2:
            raise ValueError("a comparison joined to a predicate")
        if kind[0] == "f" and word.endswith("u") and word[:-1] in COMPARE:  # or unordered
            opposite = dict(eq="!=", ne="==", lt=">=", le=">", gt="<=", ge="<")[word[:-1]]
            return f"!({a} {opposite} {b})" if word != "neu" else f"!({a} == {b})"
        if kind[0] == "f" and word == "ne":  # ordered
            return f"({a} < {b} || {a} > {b})"
        return f"{a} {COMPARE[word]} {b}"

    def converted(self, parts, operands):
        kinds = [x for x in parts if re.fullmatch(r"[usf]\d+|bf16|bf16x2|f16x2", x)]
        modes = [x for x in parts if x not in kinds]
        to, source = kinds
        if to in ("bf16x2", "f16x2"):
            name = {"bf16x2": "bfloat16_bits", "f16x2": "float16_bits"}[to]
            high, low = (f"{name}({self.value(x, 'f32')})" for x in operands[1:])
            return self.assign(operands[0], "u32", f"u32({high}) << 16 | {low}")
        if to in ("bf16", "f16"):
            name = {"bf16": "bfloat16_bits", "f16": "float16_bits"}[to]
            return self.assign(operands[0], "u16", f"{name}({self.value(operands[1], 'f32')})")
        if source == "f16":
            value = self.value(operands[1], "u16")
            return self.assign(operands[0], "f32", f"float16_value({value})")
        value = self.value(operands[1], source)
        if "sat" in modes:
            return self.assign(operands[0], to, f"saturated({value})")
        if "rni" in modes:
            return self.assign(operands[0], to, f"std::nearbyint({value})")
        if source[0] == "f" and to[0] != "f":
            if modes != ["rzi"]:
                raise ValueError(modes)
            return self.assign(operands[0], to, f"{to}({value})")
        return self.assign(operands[0], to, f"{to}({value})")

    def copied(self, parts, operands):
        if parts[1] == "commit_group":
            return "commit_copies();"
        if parts[1] == "wait_group":
            return f"wait_for_copies({operands[0]});"
        if parts[1:] != ["cg", "shared", "global"]:
            raise ValueError(parts)
        (to, to_offset), (source, offset) = (self.address(x) for x in operands[:2])
        bytes_read = self.value(operands[3], "u32")
        return f"copy_later({to} + {to_offset}, {source} + {offset}, {operands[2]}, {bytes_read});"

    def matrix(self, op, parts, operands):
        def group(text, kind):
            return (
                "{"
                + ", ".join(self.value(x.strip(), kind) for x in text.strip("{}").split(","))
                + "}"
            )

        def assigned(text, kind):
            names = [x.strip() for x in text.strip("{}").split(",")]
            return " ".join(self.assign(x, kind, f"d[{i}]") for i, x in enumerate(names))

        if op == "movmatrix" and parts == "sync aligned m8n8 trans b16".split():
            return self.assign(operands[0], "u32", f"transposed({self.value(operands[1], 'u32')})")
        if op == "ldmatrix" and parts[:4] == "sync aligned m8n8 x4".split():
            base, offset = self.address(operands[1])
            flag = "true" if "trans" in parts else "false"
            loaded = f"Four d = load_matrices<{flag}>({base} + {offset});"
            return f"{{ {loaded} {assigned(operands[0], 'u32')} }}"
        if op == "mma" and parts[:5] == "sync aligned m16n8k16 row col".split():
            if parts[5] != "f32" or parts[8] != "f32" or parts[6] != parts[7]:
                raise ValueError(parts)
            kinds = "u32", "u32", "f32"
            factors = ", ".join(group(x, k) for x, k in zip(operands[1:], kinds, strict=True))
            name = {"bf16": "bfloat16_value", "f16": "float16_value"}[parts[6]]
            made = f"FourFloats d = product<{name}>({factors});"
            return f"{{ {made} {assigned(operands[0], 'f32')} }}"
        raise ValueError(parts)

    def group_product(self, parts, operands):
        if parts[0] in ("fence", "commit_group", "wait_group"):
            return ";"  # a product is there at once
        if parts[:4] != "mma_async sync aligned m64n64k16".split() or parts[4] != "f32":
            raise ValueError(parts)
        if parts[5] != parts[6] or operands[4:6] != ["1", "1"]:  # nothing is negated
            raise ValueError(parts)
        name = {"bf16": "bfloat16_value", "f16": "float16_value"}[parts[5]]
        sums = [x.strip() for x in operands[0].strip("{}").split(",")]
        given = ", ".join(self.value(x, "f32") for x in sums)
        a, b = (self.value(x, "u64") for x in operands[1:3])
        add = self.value(operands[3], "pred")
        turned = ", ".join(("false", "true")[int(x)] for x in operands[6:8])
        assigned = " ".join(self.assign(x, "f32", f"d[{i}]") for i, x in enumerate(sums))
        made = f"GroupSums d = group_product<{name}>({a}, {b}, {add}, {turned}, {{{given}}});"
        return f"{{ {made} {assigned} }}"

    def text(self, number):
        declared = {}
        for name, kind in sorted(self.registers.items()):
            declared.setdefault(kind, []).append(f"{name}{{}}")
        declarations = [f"{kind} {', '.join(names)};" for kind, names in declared.items()]
        body = "\n".join(declarations + self.lines)
        return (
            f"// {self.name}\n"
            f"void kernel_{number}([[maybe_unused]] const void* const* parameters) {{\n{body}\n}}\n"
            f'const bool added_{number} = add_kernel("{self.name}", &kernel_{number});\n'
        )


def statements(body):
    """Lines without comments, a statement, brace or label each."""
    body = re.sub(r"//[^\n]*", "", body)
    for piece in re.findall(r"\{(?=\s*(?:cvt|\n|\.reg))|\}(?=\s*(?:\n|$))|\$\w+:|[^;]*?;", body):
        yield from separate(piece)


def separate(piece):
    piece = " ".join(piece.split())
    match = re.match(r"(\$\w+:|\{|\}) *(.*)", piece)
    while match and not REGISTER.match(piece):
        yield match[1]
        piece = match[2]
        match = re.match(r"(\$\w+:|\{|\}) *(.*)", piece)
    piece = piece.removesuffix(";").strip()
    if piece:
        yield piece


def split_operands(text):
    """By the commas outside of braces."""
    return [x.strip() for x in re.findall(r"\{[^}]*\}|[^,{}]+", text) if x.strip()]


def label(text):
    return text.strip().replace("$", "at")


def immediate(text, kind):
    if text.startswith("0f"):
        return f"bits_as<f32>(u32(0x{text[2:]}))"
    if text.startswith("0d"):
        return f"bits_as<f64>(u64(0x{text[2:]}))"
    return f"{kind}({int(text, 0)}ll)"


def main():
    source, to = sys.argv[1:]
    text = pathlib.Path(source).read_text()
    found = re.findall(
        r"\.entry\s+(\w+)\((.*?)\)\s*(?:\.\w+[^\n]*\n)*\{\n(.*?)\n\}\n", text, re.DOTALL
    )
    if len(found) != text.count(".entry "):
        raise SystemExit(f"{source}: {len(found)} of {text.count('.entry ')} kernels found")
    kernels = [Kernel(name, body) for name, _, body in found]
    with open(to, "w") as file:
        file.write('#include "ptx.hpp"\n\nnamespace lshkit::ptx {\nnamespace {\n\n')
        for number, kernel in enumerate(kernels):
            file.write(kernel.text(number) + "\n")
        file.write("}  // namespace\n}  // namespace lshkit::ptx\n")


if __name__ == "__main__":
    main()

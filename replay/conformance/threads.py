"""Probes of instructions in which threads meet: shuffles, votes, matches, sums, barriers, matrices.

Inputs are two words per thread; what each thread should get is worked out for the whole block in
plain Python.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np

from twinstep.replay.conformance.operands import sampled
from twinstep.replay.conformance.probe import Expected, Probe, Result, load, store
from twinstep.replay.dtypes import Array
from twinstep.replay.isa.forms import supported
from twinstep.replay.spec import floats

COUNT, BLOCK, WARP = 128, 64, 32
ALL, EVEN = 0xFFFFFFFF, 0x55555555
Lanes = list[int]


@functools.cache
def probes() -> tuple[Probe, ...]:
    """All probes of this module."""
    return (*_shuffles(), *_votes(), *_matches(), *_sums(), *_barriers(), *_matrices())


def _inputs(seed: str, *kinds: str) -> tuple[Array, ...]:
    return tuple(np.resize(x, COUNT) for x in sampled(kinds or ("u32", "u32"), seed, COUNT))


def _made(code: str, results: list[Result], inputs: tuple[Array, ...], shared: str = "") -> Probe:
    """A probe around code that leaves results in %r0, %r1, ..."""
    lines = [load(index, "u32") for index in range(len(inputs))]
    for place, result in enumerate(results):
        lines.append(f".reg .{'pred' if result.kind == 'pred' else 'b32'} %r{place};")
    lines.append(code)
    lines += [store(f"%r{i}", r.kind, i, COUNT) for i, r in enumerate(results)]
    stored = tuple(Result(r.form, "u32" if r.kind == "pred" else r.kind, r.wanted) for r in results)
    return Probe("\n".join(lines), inputs, stored, COUNT, BLOCK, shared)


def by_warp(function: Callable[[Lanes], Lanes], *values: Array) -> Expected:
    """A function from a warp's values to each lane's result, over all warps."""
    found: Expected = []
    for start in range(0, COUNT, WARP):
        columns = [column[start : start + WARP].tolist() for column in values]
        found += function(*columns)
    return found


def _shuffles() -> Iterator[Probe]:
    """Whole warps, segments of 8 and of 16, by a common and by every lane's own distance."""
    for mode in ("up", "down", "bfly", "idx"):
        form = f"shfl.sync.{mode}.b32"
        results: list[Result] = []
        lines: list[str] = []
        inputs = _inputs(form)
        for segment, width in ((0x00, 32), (0x18, 8), (0x10, 16)):
            control = segment << 8 | (0 if mode == "up" else 31)
            for distance in ("1", "5", "%s1"):
                place = len(results)
                lines.append(
                    f"shfl.sync.{mode}.b32 %r{place}|%r{place + 1}, %s0, {distance}, {control}, -1;"
                )
                given = inputs[1] if distance == "%s1" else np.full(COUNT, int(distance))
                sources = by_warp(functools.partial(_sources, mode, width), given)
                for kind, wanted in zip(
                    ("u32", "pred"), _shuffled(sources, inputs[0]), strict=True
                ):
                    results.append(Result(form, kind, wanted))
        yield _made("\n".join(lines), results, inputs)


def _sources(mode: str, width: int, distances: Lanes) -> Lanes:
    """The lane that each lane reads; -1 where that lane is not in its segment."""
    found = []
    for lane, distance in enumerate(distances):
        first, by = lane - lane % width, distance & 31
        source = {"up": lane - by, "down": lane + by, "bfly": lane ^ by}.get(mode)
        if source is None:
            source = first + (by % width)
        inside = source >= first if mode == "up" else source < first + width
        found.append(source if inside else -1)
    return found


def _shuffled(sources: Expected, values: Array) -> tuple[Expected, Expected]:
    read: Expected = []
    for thread, source in enumerate(sources):
        assert source is not None
        start = thread - thread % WARP
        read.append(int(values[thread if source < 0 else start + source]))
    return read, [int(s is not None and s >= 0) for s in sources]


def _some(code: str, mask: int) -> str:
    """Code that all lanes, or only the even ones, execute."""
    if mask == ALL:
        return code
    even = ".reg .pred %even; and.b32 %t, %lane, 1; setp.eq.u32 %even, %t, 0; @!%even bra ODD;"
    return f"{even} {code} ODD:"


def _masked(function: Callable[[Lanes, list[int]], Lanes], mask: int) -> Callable[[Lanes], Lanes]:
    """A function of the participating lanes; the others get 0."""
    part = [lane for lane in range(WARP) if mask >> lane & 1]

    def whole(values: Lanes) -> Lanes:
        found = function([values[lane] for lane in part], part)
        results = dict(zip(part, found, strict=True))
        return [results.get(lane, 0) for lane in range(WARP)]

    return whole


def _shared(function: Callable[[Lanes, list[int]], int]) -> Callable[[Lanes, list[int]], Lanes]:
    """One value that every participating lane gets."""
    return lambda values, part: [function(values, part)] * len(values)


def _votes() -> Iterator[Probe]:
    meanings: dict[str, Callable[[Lanes, list[int]], int]] = {
        "any": lambda p, part: int(any(p)),
        "all": lambda p, part: int(all(p)),
        "uni": lambda p, part: int(len(set(p)) == 1),
        "ballot": lambda p, part: sum(b << lane for b, lane in zip(p, part, strict=True)),
    }
    for threshold in (0, 1 << 31, 1 << 30, ALL):
        inputs = _inputs(f"vote {threshold}")
        flags = (inputs[0] < np.uint64(threshold)).astype(np.uint32)
        for mask in (ALL, EVEN):
            lines = [f".reg .pred %q; setp.lt.u32 %q, %s0, {threshold};"]
            results: list[Result] = []
            calls: list[str] = []
            for place, (name, function) in enumerate(meanings.items()):
                kind, form = ("u32", f"vote.sync.{name}.b32")
                if name != "ballot":
                    kind, form = "pred", f"vote.sync.{name}.pred"
                lines.append(_zero(place, kind))
                calls.append(f"{form} %r{place}, %q, {mask};")
                each = _masked(_shared(function), mask)
                results.append(Result(form, kind, by_warp(each, flags)))
            calls.append("activemask.b32 %r4;")
            lines.append(_zero(4, "u32"))
            here = by_warp(_masked(_shared(lambda v, p: sum(1 << i for i in p)), mask), flags)
            results.append(Result("activemask.b32", "u32", here))
            calls.append(f"elect.sync %r5|%r6, {mask};")
            lines += [_zero(5, "u32"), _zero(6, "pred")]
            leader = by_warp(_masked(lambda v, p: [int(i == p[0]) for i in p], mask), flags)
            results += [Result("elect.sync", "u32", [0] * COUNT)]
            results += [Result("elect.sync", "pred", leader)]
            yield _made("\n".join([*lines, _some(" ".join(calls), mask)]), results, inputs)


def _zero(place: int, kind: str) -> str:
    if kind == "pred":
        return f"setp.ne.u32 %r{place}, 0, 0;"
    return f"mov.u32 %r{place}, 0;"


def _matches() -> Iterator[Probe]:
    for spread in (1, 3, ALL):
        inputs = _inputs(f"match {spread}")
        narrow = inputs[0] % np.uint32(spread)
        for mask in (ALL, EVEN):
            lines, calls = [f"rem.u32 %s0, %s0, {spread};"], list[str]()
            results: list[Result] = []
            lines.append(".reg .b64 %wide; cvt.u64.u32 %wide, %s0; shl.b64 %wide, %wide, 31;")
            for kind, source in (("b32", "%s0"), ("b64", "%wide")):
                place = len(results)
                calls.append(f"match.any.sync.{kind} %r{place}, {source}, {mask};")
                same = by_warp(_masked(_equals, mask), narrow)
                results.append(Result(f"match.any.sync.{kind}", "u32", same))
                form = f"match.all.sync.{kind}"
                calls.append(f"{form} %r{place + 1}|%r{place + 2}, {source}, {mask};")
                whole = by_warp(_masked(_agreed, mask), narrow)
                results.append(Result(form, "u32", whole))
                results.append(Result(form, "pred", [int(bool(w)) for w in whole]))
            lines += [_zero(place, result.kind) for place, result in enumerate(results)]
            yield _made("\n".join([*lines, _some(" ".join(calls), mask)]), results, inputs)


def _equals(values: Lanes, part: list[int]) -> Lanes:
    pairs = list(zip(values, part, strict=True))
    return [sum(1 << lane for other, lane in pairs if other == value) for value in values]


def _agreed(values: Lanes, part: list[int]) -> Lanes:
    mask = sum(1 << lane for lane in part)
    return [mask if len(set(values)) == 1 else 0] * len(values)


def _sums() -> Iterator[Probe]:
    forms = [form for form in supported() if form.startswith("redux.")]
    floats = [form for form in forms if form.endswith("f32")]
    for group in (sorted(set(forms) - set(floats)), floats):
        inputs = _inputs(group[0], "f32" if group is floats else "u32")
        for mask in (ALL, EVEN):
            lines = [_zero(place, "u32") for place in range(len(group))]
            calls = [f"{form} %r{place}, %s0, {mask};" for place, form in enumerate(group)]
            results = []
            for form in group:
                one = functools.partial(_reduced, form)
                each = _masked(_shared(one), mask)
                kind = "f32" if group is floats else "u32"
                results.append(Result(form, kind, by_warp(each, inputs[0])))
            code = "\n".join([*lines, _some(" ".join(calls), mask)])
            yield _made(code, results, inputs)


def _reduced(form: str, values: Lanes, part: list[int]) -> int:
    _, _, operation, *_, kind = form.split(".")
    if kind == "f32":
        scalar = form.replace("redux.sync.", "")
        return functools.reduce(lambda a, b: floats.arithmetic(scalar, (a, b)), values)
    whole = [floats.integer(v, kind) if kind[0] == "s" else v for v in values]
    combine: dict[str, Callable[[int, int], int]] = {
        "add": lambda a, b: a + b,
        "min": min,
        "max": max,
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b,
    }
    return functools.reduce(combine[operation], whole) & ALL


_BUFFER = f".shared .align 4 .b8 buffer[{4 * BLOCK}];"


def _barriers() -> Iterator[Probe]:
    """Before the barrier each thread writes a word, after it it reads its opposite's."""
    for form in supported():
        parts = form.split(".")
        if parts[0] not in ("bar", "barrier"):
            continue
        inputs = _inputs(form)
        if "red" in parts:
            yield _block_vote(form, parts, inputs)
            continue
        group = WARP if "warp" in parts else BLOCK
        operand = "-1" if "warp" in parts else "0"
        code = f"""
        .reg .b32 %place, %mate; mov.u32 %place, buffer; mov.u32 %t, %tid.x;
        xor.b32 %mate, %t, {group - 1}; shl.b32 %mate, %mate, 2; add.u32 %mate, %mate, %place;
        shl.b32 %t, %t, 2; add.u32 %place, %place, %t;
        st.shared.u32 [%place], %s0; {form} {operand}; ld.shared.u32 %r0, [%mate];"""
        wanted: Expected = [int(inputs[0][i ^ (group - 1)]) for i in range(COUNT)]
        yield _made(code, [Result(form, "u32", wanted)], inputs, _BUFFER)


def _block_vote(form: str, parts: list[str], inputs: tuple[Array, ...]) -> Probe:
    kind = "u32" if "popc" in parts else "pred"
    wanted: Expected = []
    for start in range(0, COUNT, BLOCK):
        flags = [int(v) < 1 << 31 for v in inputs[0][start : start + BLOCK]]
        value = sum(flags) if kind == "u32" else (all(flags) if "and" in parts else any(flags))
        wanted += [int(value)] * BLOCK
    code = f".reg .pred %q; setp.lt.u32 %q, %s0, 0x80000000; {form} %r0, 1, %q;"
    return _made(code, [Result(form, kind, wanted)], inputs)


def _matrices() -> Iterator[Probe]:
    """Each lane's 16 bytes are a row; lane l gets two items of each matrix."""
    space = f".shared .align 16 .b8 buffer[{16 * BLOCK}];"
    address = """
    .reg .b32 %row, %far; mov.u32 %row, buffer; mov.u32 %t, %tid.x; shl.b32 %t, %t, 4;
    add.u32 %row, %row, %t;"""
    fill = "st.shared.v4.b32 [%row], {%s0, %s1, %s2, %s3};"
    for form in supported():
        family, *parts = form.split(".")
        if family not in ("ldmatrix", "stmatrix"):
            continue
        inputs = _inputs(form, *["u32"] * 4)
        count = next(int(p[1]) for p in parts if p in ("x1", "x2", "x4"))
        names = [f"%r{i}" for i in range(count)]
        vector = "{" + ", ".join(names) + "}"
        swap = "trans" in parts
        if family == "ldmatrix":
            code = f"{address} {fill} bar.sync 0; {form} {vector}, [%row];"
            wanted = [by_rows(functools.partial(_gathered, i, swap), inputs) for i in range(count)]
            results = [Result(form, "u32", column) for column in wanted]
        else:
            moves = " ".join(f"mov.b32 {name}, %s{i};" for i, name in enumerate(names))
            code = f"{address} {fill} bar.sync 0; {moves} {form} [%row], {vector}; bar.sync 0; "
            code += f"ld.shared.v4.b32 {{{', '.join(f'%o{i}' for i in range(4))}}}, [%row];"
            code = ".reg .b32 %o<4>;" + code
            wanted = [
                by_rows(functools.partial(_scattered, i, count, swap), inputs) for i in range(4)
            ]
            results = [Result(form, "u32", column) for column in wanted]
            code += " ".join(f"mov.b32 %r{i}, %o{i};" for i in range(4))
        yield _made(code, results, inputs, space)


Rows = list[list[int]]


def by_rows(function: Callable[[Rows, int], int], inputs: tuple[Array, ...]) -> Expected:
    """A function of a warp's rows (8 items of 16 bits each) and a lane, over all threads."""
    found: Expected = []
    for start in range(0, COUNT, WARP):
        rows = []
        for lane in range(start, start + WARP):
            words = [int(column[lane]) for column in inputs]
            rows.append([w >> s & 0xFFFF for w in words for s in (0, 16)])
        found += [function(rows, lane) for lane in range(WARP)]
    return found


def _gathered(matrix: int, swap: bool, rows: Rows, lane: int) -> int:
    pair = [(lane // 4, 2 * (lane % 4) + half) for half in (0, 1)]
    items = [rows[8 * matrix + (c if swap else r)][r if swap else c] for r, c in pair]
    return items[1] << 16 | items[0]


def _scattered(word: int, count: int, swap: bool, rows: Rows, lane: int) -> int:
    """Word `word` of row `lane` after the first `count` matrices were overwritten."""
    matrix, line = divmod(lane, 8)
    items = []
    for column in (2 * word, 2 * word + 1):
        r, c = (column, line) if swap else (line, column)
        source = rows[4 * r + c // 2]
        items.append(source[2 * matrix + c % 2] if matrix < count else rows[lane][column])
    return items[1] << 16 | items[0]

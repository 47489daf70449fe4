"""Mutants that are the same program to whoever uses it: mutate.py does not count them."""

from __future__ import annotations

_LISTED: dict[str, list[tuple[str, str, str]]] = {
    "summary.py": [
        (
            "start = next(text[:end] for end in range(720, 0, -10) if len(json.dumps(text[:end])) <= 722)",
            "start = next(text[:end] for end in range(720, -1, -10) if len(json.dumps(text[:end])) <= 722)",
            "ten characters are always short enough",
        ),
        (
            'return rows[0][begin[1] :] + "".join(rows[1:])',
            'return rows[0][begin[ 2] :] + "".join(rows[1:])',
            "only Python 3.12 and newer cut f-strings into several tokens",
        ),
    ],
    "state.py": [
        (
            'rest = {name: value for name, value in content.items() if name != "fingerprint"}',
            'rest = {name: value for name, value in content.items() if name is not "fingerprint"}',
            "CPython keeps one string of that name",
        ),
    ],
    "order/interleave.py": [
        ("while high - low > 1:", "while high - low != 1:", "high stays above low"),
    ],
    "order/stream.py": [
        (
            "if len(segments) == 1 and self.sizes.size == 1:",
            "if not len(segments) == 1 and self.sizes.size == 1:",
            "one source has one order, in one segment or in several",
        ),
        (
            'if self._batch.last == "drop":',
            'if self._batch.last is "drop":',
            "CPython keeps one string of it",
        ),
        (
            'end = whole if last == "drop" or end == whole else self.start(step + 1)',
            'end = whole if last == "drop" or end <= whole else self.start(step + 1)',
            "the end lies in the step that begins there",
        ),
    ],
    "plan/fill.py": [
        (
            "heapq.heappush(parked, (-room[full], loaded, full))",
            "heapq.heappush(parked, (~room[full], loaded, full))",
            "a group that returns a token too early is parked again",
        ),
        (
            "rates = np.array([cost.alpha, cost.window or 0, cost.ring_tokens, padding, 1 - FULL], np.float64)",
            "rates = np.array([cost.alpha, cost.window or 0, cost.ring_tokens, padding, 1 % FULL], np.float64)",
            "a share below 1 goes into 1 once",
        ),
    ],
    "order/positions.py": [
        (
            "here = (local[source] >= 0) & (count >= segment.drawn[source])",
            "here = (local[source] >= 0) * (count >= segment.drawn[source])",
            "both are of truth values",
        ),
    ],
    "multimodal/parts.py": [
        ("if len(found) < 2:", "if len(found) < 1:", "merging the parts of one source gives them back"),
    ],
    "sequence/runs.py": [
        (
            "*(address(out), out.itemsize, out.strides[0] if rows > 1 else 0, out.shape[-1]),",
            "*(address(out), out.itemsize, out.strides[0] if rows > 1 else 0, out.shape[- 0]),",
            "NumPy copies what the compiled loop refuses",
        ),
    ],
}
"""By file: a line, what the mutant has instead, and why nobody can tell them apart."""

SAME = {(file, before, after) for file, listed in _LISTED.items() for before, after, _ in listed}

"""The pictures of docs/concepts.md, drawn from what the functions that they show return.

python docs/make/pictures.py        # writes docs/pictures/*.svg anew; a test compares
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

import meshfeed as mf
from meshfeed.order import draws_of_step
from meshfeed.plan import account_of, packs_of, plan_step, slices_of
from meshfeed.roles import DeliveryName, Role

FOLDER = Path(__file__).parents[1] / "pictures"

INK, FAINT, PAPER = "#263238", "#90a4ae", "#ffffff"
COLOURS = ("#90caf9", "#ffcc80", "#a5d6a7", "#ce93d8", "#ef9a9a", "#80cbc4", "#e6ee9c", "#bcaaa4")
EMPTY = "#eceff1"


def rect(x: float, y: float, width: float, height: float, fill: str, *, stroke: str = PAPER) -> str:
    """A box with round corners."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}" '
        f'stroke="{stroke}"/>'
    )


def text(x: float, y: float, words: str, *, size: int = 12, anchor: str = "middle", fill: str = INK) -> str:
    """One line; y is its base line."""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{fill}">{words}</text>'


def arrow(x1: float, x2: float, y: float, *, network: bool) -> str:
    """From above one place of a row to above another, dashed where it crosses the network."""
    height = 12 + abs(x2 - x1) / 9
    dash = ' stroke-dasharray="4 3"' if network else ""
    return (
        f'<path d="M {x1:g} {y:g} C {x1:g} {y - height:g}, {x2:g} {y - height:g}, {x2:g} {y:g}" fill="none" '
        f'stroke="{INK}" stroke-width="1.3" marker-end="url(#tip)"{dash}/>'
    )


def svg(width: int, height: int, title: str, shapes: Iterable[str]) -> str:
    """A whole picture on white paper, which reads on a dark page too."""
    tip = (
        '<defs><marker id="tip" markerWidth="7" markerHeight="7" refX="5.5" refY="3" orient="auto">'
        f'<path d="M0,0 L6,3 L0,6 z" fill="{INK}"/></marker></defs>'
    )
    paper = f'<rect width="{width}" height="{height}" rx="6" fill="{PAPER}"/>'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'font-family="sans-serif"><title>{title}</title>'
    )
    return "\n".join([head, tip, paper, *shapes, "</svg>", ""])


def order() -> str:
    """Four steps of a mixture."""
    sizes, shares = {"code": 20, "docs": 12, "math": 3}, (0.5, 0.3, 0.2)
    sources = {name: (mf.Lengths([8] * n), share) for (name, n), share in zip(sizes.items(), shares)}
    batch = mf.Batch(sequences=10)
    recipe = mf.Recipe(data=mf.Mixture(sources), sequence=mf.Documents(), batch=batch, seed=7)
    shapes = [text(20, 24, "position", anchor="start", fill=FAINT)]
    for step in range(4):
        draws, y = draws_of_step(recipe, step), 40 + 46 * step
        shapes.append(text(20, y + 23, f"step {step}", anchor="start", size=13))
        for at, (source, epoch, index) in enumerate(
            zip(draws.source.tolist(), draws.epoch.tolist(), draws.index.tolist())
        ):
            x = 84 + 62 * at
            shapes.append(rect(x, y, 60, 36, COLOURS[source]))
            shapes.append(text(x + 30, y + 16, f"{list(sizes)[source]} {index}"))
            shapes.append(text(x + 30, y + 29, f"epoch {epoch}", size=9, fill="#546e7a"))
            if step == 0:
                shapes.append(text(x + 30, 24, str(at), size=10, fill=FAINT))
    return svg(724, 232, "four steps of a mixture", shapes)


LENGTHS = (3900, 260, 1200, 700, 350, 2600, 90, 1500, 410, 3000, 800, 150, 520, 1900, 240, 610, 1100, 330)


def plan() -> str:
    """The same documents packed in stream order, and balanced: bars are as long as their work."""
    cost = mf.CostModel(alpha=2000)
    shapes: list[str] = []
    y = 16
    for policy in ("in_order", "balanced"):
        packing = mf.Packing(capacity=4096, policy=policy, cost=cost)
        made = plan_step(LENGTHS, packing, dp=4)
        account = account_of(made, packing)
        told = f"{policy}: {made.num_microbatches} microbatches, efficiency {account.efficiency:.2f}"
        shapes.append(text(20, y + 8, told, anchor="start", size=13))
        widest = account.loads.max()
        for rank in range(4):
            for microbatch, pack in enumerate(packs_of(made, rank)):
                x, top = 84 + microbatch * 316, y + 18 + 26 * rank
                shapes.append(rect(x, top, 308, 22, EMPTY))
                for place in pack.sequences.tolist():
                    work = float(cost.load(np.array([LENGTHS[place]]), np.array([1]))[0])
                    width = 308 * work / widest
                    shapes.append(rect(x, top, width, 22, COLOURS[place % len(COLOURS)]))
                    if width > 26:
                        shapes.append(text(x + width / 2, top + 15, str(LENGTHS[place]), size=10))
                    x += width
            shapes.append(text(20, y + 33 + 26 * rank, f"dp rank {rank}", anchor="start", size=11))
        y += 140
    return svg(84 + 316 * 2 + 8, y, "documents packed in stream order and balanced", shapes)


def split() -> str:
    """Two documents of a pack, split for cp 2 both ways."""
    lengths = (8, 4)
    packing = mf.Packing(capacity=16)
    made = plan_step(lengths, packing, dp=1, cp=2)
    packs = packs_of(made, 0)
    shapes: list[str] = []
    for row, way in enumerate(("zigzag", "contiguous")):
        y, x = 16 + 46 * row, 110
        shapes.append(text(20, y + 20, way, anchor="start", size=13))
        owner = {
            (int(s), token): rank
            for rank in range(2)
            for s, a, b in zip(*(each.tolist() for each in _slices(packs[0], rank, way)))
            for token in range(a, b)
        }
        for place, document in enumerate(packs[0].sequences.tolist()):
            for token in range(int(packs[0].padded_lengths[place])):
                rank = owner[place, token]
                shapes.append(rect(x, y, 32, 30, COLOURS[rank]))
                shapes.append(text(x + 16, y + 19, f"{'ab'[document]}{token}", size=11))
                x += 33
            x += 14
    shapes += [rect(110, 108, 14, 14, COLOURS[0]), text(130, 120, "cp rank 0", anchor="start")]
    shapes += [rect(220, 108, 14, 14, COLOURS[1]), text(240, 120, "cp rank 1", anchor="start")]
    return svg(560, 134, "tokens of two documents on two cp ranks", shapes)


def _slices(pack: mf.plan.Pack, rank: int, way: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    held = slices_of(pack, [rank], way)
    return held.sequence, held.start, held.stop


LAYOUT = mf.Layout.parse("tp2-cp2-pp4", ranks_per_node=8)
_NEEDS = {"tokens": COLOURS[0], "labels": COLOURS[1], "": EMPTY}


def _needs(role: Role) -> str:
    return next((name for name in ("tokens", "labels") if name in role.fields), "")


def _x_of(rank: int) -> float:
    return 24 + 42 * rank + 26 * (rank // 8)


def _row_of_ranks(roles: Sequence[Role], y: float) -> Iterable[str]:
    for node in (0, 1):
        yield rect(_x_of(8 * node) - 6, y - 6, 8 * 42 + 8, 42, PAPER, stroke=FAINT)
    for role in roles:
        x = _x_of(role.rank)
        yield rect(x, y, 38, 30, _NEEDS[_needs(role)], stroke=INK if role.reads else PAPER)
        if role.reads:
            yield rect(x + 1.5, y + 1.5, 35, 27, "none", stroke=INK)
        yield text(x + 19, y + 20, str(role.rank))


def roles() -> str:
    """What every rank of one replica needs."""
    fields = mf.Windows(4096).fields
    every = list(mf.roles.assign_roles(LAYOUT, mf.StageMap(pp=4), fields, "direct"))
    shapes = list(_row_of_ranks([_not_reading(role) for role in every], 46))
    for stage in range(4):
        x = _x_of(4 * stage)
        shapes.append(text(x + 82, 22, f"pipeline stage {stage}", size=12))
    for node in (0, 1):
        shapes.append(text(_x_of(8 * node) + 166, 104, f"node {node}", size=11, fill=FAINT))
    for at, (name, says) in enumerate(
        (("tokens", "needs tokens"), ("labels", "needs labels"), ("", "needs nothing that is stored"))
    ):
        x = 24 + 170 * at
        shapes += [rect(x, 118, 14, 14, _NEEDS[name]), text(x + 20, 130, says, anchor="start")]
    return svg(728, 146, f"what the ranks of {LAYOUT} need", shapes)


def _not_reading(role: Role) -> Role:
    return mf.roles.Role(
        rank=role.rank, reads=False, source=role.source, peers=role.peers, fields=role.fields
    )


def delivery() -> str:
    """Who reads, and who gets what from whom, by each delivery."""
    fields, shapes = mf.Windows(4096).fields, []
    names: tuple[DeliveryName, ...] = ("direct", "broadcast", "share", "tree")
    for row, name in enumerate(names):
        assigned = mf.roles.assign_roles(LAYOUT, mf.StageMap(pp=4), fields, name)
        y = 76 + 128 * row
        readers = int(assigned.reads.sum())
        shapes.append(
            text(24, y - 56, f"{name}: {readers} reader{'s' * (readers > 1)}", anchor="start", size=13)
        )
        shapes += _row_of_ranks(list(assigned), y)
        for role in assigned:
            if role.giver is not None and role.giver != role.rank:
                network = bool(LAYOUT.node(role.giver) != LAYOUT.node(role.rank))
                shapes.append(arrow(_x_of(role.giver) + 19, _x_of(role.rank) + 19, y - 2, network=network))
    return svg(728, 128 * 4 + 4, f"who reads under four deliveries of {LAYOUT}", shapes)


PICTURES = {"order": order, "plan": plan, "split": split, "roles": roles, "delivery": delivery}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw())

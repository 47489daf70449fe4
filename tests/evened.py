"""Plans of steps with encoders: packs that are even for these, too."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from meshfeed import plan
from meshfeed.multimodal.encoders import even_out


def plan_step(
    lengths: npt.ArrayLike,
    packing: plan.Packing,
    *,
    encoder_work: npt.ArrayLike | None = None,
    dp: int,
    cp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    encoder: Any = "group",
    **others: Any,
) -> plan.StepPlan:
    """`plan.plan_step`, evened out for the work of encoders if there is any."""
    made = plan.plan_step(lengths, packing, dp=dp, cp=cp, pp=pp, vpp=vpp, **others)
    if encoder_work is None:
        return made
    return even_out(made, lengths, encoder_work, packing, dp=dp, cp=cp, pp=pp, vpp=vpp, encoder=encoder)

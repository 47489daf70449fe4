"""The recipe of train_vlm.py, for meshfeed's commands:

    meshfeed plan examples/vlm_recipe.py --layout tp2-dp2-pp2 --capacity 128 --html plan.html

The shapes are in ./shapes, or in the folder that $SHAPES names; they are drawn where it does not exist.
"""

from __future__ import annotations

import os
from pathlib import Path

from train_vlm import arguments, draw_shapes, recipe_of

shapes = Path(os.environ.get("SHAPES", "shapes"))
if not shapes.exists():
    draw_shapes(shapes)
recipe = recipe_of(arguments(["--layout", "dp1", "--shapes", str(shapes), "--out", "."]))

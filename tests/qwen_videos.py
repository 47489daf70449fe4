"""What transformers makes of videos for Qwen's models. Its processor of video asks for torchvision, of which it takes two
functions; a process of its own has these, so that no other test sees them. They are written here after torchvision's: what is
held against transformers is which frames, which size, the order and the values of patches; that torchvision resizes by the same
kernel of torch is not.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import numpy.typing as npt

import quick


@dataclass
class Asked:
    """A video for a processor.

    Attributes:
        frames: all of it; uint8 [frames, height, width, 3].
        rate: frames per second.
        options: of the processor.
        fps: frames sampled per second; None where the options give their number.
        family: module and class of the processor.
    """

    frames: npt.NDArray[np.uint8]
    rate: float
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    fps: float | None = 2
    family: tuple[str, str] = ("qwen2_vl", "Qwen2VLVideoProcessor")


@dataclass
class Made:
    """What came of it: pixel_values_videos, video_grid_thw [1, 3], if any, and the seconds of a step in time."""

    pixels: npt.NDArray[np.float32]
    grid: npt.NDArray[np.int64]
    seconds: float


def by_transformers(asked: Sequence[Asked]) -> list[Made]:
    """What the processors of transformers make of videos."""
    return with_torchvision(_made_of, list(asked))


def with_torchvision(function: Callable[..., Any], *args: Any) -> Any:
    """What a function of a module gives in the other process."""
    with tempfile.TemporaryDirectory() as folder:
        there, made = Path(folder, "asked"), Path(folder, "made")
        there.write_bytes(pickle.dumps((function.__module__, function.__name__, args)))
        code = f"import qwen_videos; qwen_videos.main({str(there)!r}, {str(made)!r})"
        paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        subprocess.run([quick.at_hand(), "-c", code], check=True, env=os.environ | paths)
        return pickle.loads(made.read_bytes())


class InterpolationMode(Enum):
    """Torchvision's."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def _with_torchvision() -> None:
    """Let it resize and normalize as torchvision does: bytes by torch's own kernel, without a detour to float."""
    import torch

    for name in [each for each in sys.modules if each.partition(".")[0] == "transformers"]:
        del sys.modules[name]  # it has looked for torchvision already

    def resize(image: Any, size: Any, interpolation: Any = None, antialias: bool = True) -> Any:
        if tuple(image.shape[-2:]) == tuple(size):
            return image
        flat = image.reshape(-1, *image.shape[-3:])
        mode = {2: "bilinear", 3: "bicubic"}.get(interpolation.value, interpolation.value)  # or Pillow's
        made = torch.nn.functional.interpolate(flat, list(size), mode=mode, antialias=antialias)
        return made.reshape(*image.shape[:-2], *size)

    def normalize(image: Any, mean: Any, std: Any, inplace: bool = False) -> Any:
        mean, std = (torch.as_tensor(each, dtype=image.dtype).view(-1, 1, 1) for each in (mean, std))
        return (image - mean) / std

    class Anything(ModuleType):
        InterpolationMode = InterpolationMode

        def __getattr__(self, name: str) -> Any:
            return MagicMock()

    names = (
        "",
        ".io",
        ".transforms",
        ".transforms.functional",
        ".transforms.v2",
        ".transforms.v2.functional",
    )
    for name in (f"torchvision{each}" for each in names):
        module: Any = Anything(name)
        module.__path__, module.__spec__ = [], ModuleSpec(name, None)
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    functional: Any = sys.modules["torchvision.transforms.v2.functional"]
    functional.resize, functional.normalize = resize, normalize
    functional.grayscale_to_rgb = _as_it_is


def _as_it_is(video: Any) -> Any:
    """Of three channels already."""
    return video


def _made(asked: Asked) -> Made:
    import torch
    from transformers.video_utils import VideoMetadata

    module, name = asked.family
    made = importlib.import_module(f"transformers.models.{module}.video_processing_{module}")
    processor = getattr(made, name)(**asked.options)
    metadata = VideoMetadata(total_num_frames=len(asked.frames), fps=asked.rate)
    video = torch.from_numpy(asked.frames).permute(0, 3, 1, 2)
    given = {"do_sample_frames": True, "return_tensors": "pt", "return_metadata": True}
    given |= {} if asked.fps is None else {"fps": asked.fps}
    out = processor(videos=[video], video_metadata=[metadata], **given)
    (told,) = out["video_metadata"]
    seconds = getattr(processor, "temporal_patch_size", 1) / told.sampled_fps
    grid = out.get("video_grid_thw", torch.zeros(0, 3, dtype=torch.int64))
    return Made(out["pixel_values_videos"].numpy(), grid.numpy(), seconds)


def _made_of(asked: Sequence[Asked]) -> list[Made]:
    return [_made(each) for each in asked]


def main(asked: str, made: str) -> None:
    """What `with_torchvision` starts."""
    _with_torchvision()
    module, name, args = pickle.loads(Path(asked).read_bytes())
    Path(made).write_bytes(pickle.dumps(getattr(importlib.import_module(module), name)(*args)))

"""Without its framework, whatever is asked for first names the extra to install."""

from __future__ import annotations

import subprocess
import sys

from meshfeed.extras import install

# Each line is one way into an integration, in a process where no framework can be imported.
CODE = """
import sys
for name in ("megatron", "lightning", "torchtitan", "transformers", "nemo_automodel"):
    sys.modules[name] = None
import importlib
import meshfeed as mf
from meshfeed.integrations import megatron

recipe = mf.Recipe(data=mf.Lengths([4]), sequence=mf.Documents(), batch=mf.Batch(sequences=1))
pack = dict.fromkeys(("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "total_tokens", "pad_between_seqs"))
wrapper = megatron.HybridCPDataLoaderWrapper(iter([[]]), None)
for call in (
    megatron.layout,
    megatron.is_reader,
    megatron.readers,
    lambda: megatron.feed(recipe),
    lambda: megatron.get_batch(iter([pack])),
    lambda: megatron.SequencePacking()(iter([]), None, 1),
    lambda: next(wrapper),
    lambda: importlib.import_module("meshfeed.integrations.lightning"),
    lambda: importlib.import_module("meshfeed.integrations.torchtitan"),
    lambda: importlib.import_module("meshfeed.integrations.transformers"),
    lambda: importlib.import_module("meshfeed.integrations.automodel"),
    lambda: importlib.import_module("meshfeed.integrations.automodel_vlm"),
    lambda: importlib.import_module("meshfeed.integrations.bridge"),
):
    try:
        call()
    except Exception as error:
        print(type(error).__name__, str(error).rpartition("; ")[2])
"""


def test_a_missing_framework_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=120
    )
    extras = ["megatron"] * 7 + ["lightning", "torchtitan", "transformers", "automodel", "automodel"]
    told = [*map(install, extras), "install Megatron-Bridge from its repository"]
    assert done.stdout.splitlines() == [f"MeshfeedError {each}" for each in told]

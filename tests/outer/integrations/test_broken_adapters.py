"""A broken adapter breaks no other, nor the core."""

from __future__ import annotations

import json
import subprocess

import quick

RESTS_ON = {
    "bridge": {"megatron"},
    "model_parts": {"apart"},
    "transformers": {"apart", "model_parts", "share_encoders"},
}
"""Adapters of one framework's family."""

# Each adapter in turn raises at its import, as with a release of its framework that it does not know.
CODE = """
import importlib, json, pkgutil, sys
import meshfeed.integrations

PACKAGE = "meshfeed.integrations"
ADAPTERS = {each.name for each in pkgutil.iter_modules(meshfeed.integrations.__path__)} - {"config", "loader"}
broken = ""

class Breaks:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == f"{PACKAGE}.{broken}":
            raise AttributeError("what its framework no longer has")

sys.meta_path.insert(0, Breaks)

def fails(name):
    try:
        importlib.import_module(name)
    except Exception:
        return True

for broken in ("", *sorted(ADAPTERS)):
    for name in [each for each in sys.modules if each.partition(".")[0] == "meshfeed"]:
        del sys.modules[name]
    import meshfeed as mf
    assert mf.Feed and mf.Exchange and mf.simulate and mf.open
    failed = [name for name in sorted(ADAPTERS) if fails(f"{PACKAGE}.{name}")]
    print(json.dumps([broken, failed]))
"""


def test_a_broken_adapter_breaks_no_other() -> None:
    done = subprocess.run([quick.python(), "-c", CODE], capture_output=True, text=True, check=True)
    (none, missing), *each = [json.loads(line) for line in done.stdout.splitlines()]
    assert none == "" and {"lightning", "megatron", "rl", "transformers"} <= {
        broken for broken, _ in each
    } - set(missing)
    for broken, failed in each:
        rest = {name for name, below in RESTS_ON.items() if broken in below}
        assert set(failed) == {broken, *rest, *missing}, broken

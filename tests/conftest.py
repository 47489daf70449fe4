"""The order of the files, which of them `make test` leaves to `make test-all`, and how long they search.

The files that take longest come first: where several processes share the files, none is left with one at the end.

MESHFEED_SOAK=1 (set by `make soak`) is the long form of every test that has one: see soak.py. Hypothesis then draws new
examples each time; otherwise it always draws the same ones, so that `make test` fails or passes for everybody alike.
"""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import os
import platform
from pathlib import Path

import pytest
from hypothesis import settings

import forks
import quick
import world
from soak import SOAK, cases, left_out

gc.disable()  # until all is imported: what is imported stays
# Each connection to a TCPStore looks up the name of its peer, which takes 5 s where a resolver drops queries.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# Files run side by side and keep every core busy: further threads of one process would wait for each other, spinning.
os.environ.setdefault("OMP_NUM_THREADS", "1")

LONGEST = (
    "test_demo.py", "test_prepare_engines.py", "test_lost_store.py", "test_pages.py", "test_deliveries.py",
    "test_cached.py", "test_meeting.py", "test_release.py", "test_amendments.py", "test_far_faults.py",
    "test_failure.py", "test_later_changes.py", "test_run_report.py", "test_rule.py", "test_prepare_kills.py",
    "test_prepare_storage.py", "test_jobs.py", "test_sources.py", "test_samples.py", "test_feed.py",
    "test_prepare_multimodal.py", "test_document_files.py", "test_video_processor.py", "test_raw_text.py",
    "test_start.py", "test_object_stores.py", "test_exit.py", "test_decode_workers.py", "test_far.py",
    "test_core_alone.py", "test_megatron_hybrid.py", "test_megatron_schedule.py", "test_nodes.py",
    "test_megatron_training.py", "test_transformers_loop.py", "test_resume.py", "test_vlm_example.py",
    "test_fixed_shapes.py", "test_megatron_batches.py", "test_loop_pages.py", "test_strangers.py",
    "test_histories.py", "test_hub.py", "test_suite.py", "test_many_sources.py",
)  # fmt: skip

FURTHER = (
    "test_chat_families.py", "test_demo.py", "test_docs_migrating.py", "test_gpu_page.py", "test_online_mixing.py", "test_pages.py",
    "test_prepare_engines.py", "test_release.py", "test_vlm_example.py",
)  # fmt: skip
"""Files of what seldom breaks alone: pages, examples, engines, packaging; and adapters but these:"""
ADAPTERS = (
    "test_accelerate_lives.py", "test_broken_adapters.py", "test_config_tables.py", "test_lightning_loop.py", "test_lives.py",
    "test_megatron_batches.py", "test_megatron_config.py", "test_megatron_gpt_order.py", "test_missing_frameworks.py",
    "test_packs_of_families.py", "test_rl.py", "test_torchtitan_loop.py", "test_train_loader.py", "test_transformers_loop.py",
)  # fmt: skip

BUILD = Path(__file__).parents[1] / "hatch_build.py"

settings.register_profile(
    "tests", settings.get_profile("ci"), max_examples=cases(30, 500), derandomize=not SOAK
)
settings.load_profile("tests")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "only_soak: see soak.py")
    config.addinivalue_line("markers", "some(most): see soak.py")
    config.addinivalue_line("markers", "further: `make test-all` runs it, `make test` does not")
    if not hasattr(config, "workerinput"):  # not in each of the processes that share the files
        compile_what_the_tree_holds()
        if config.getoption("numprocesses", None):
            quick.share()  # it has compiled what others import, too, before they begin
    if quick.SHARED in os.environ:
        multiprocessing.set_executable(quick.python())  # of processes that are not forked
        world.share()


def pytest_collection_finish() -> None:
    """Tests that collect garbage, and forks, need not look at what was imported."""
    forks.settle()
    gc.enable()


def compile_what_the_tree_holds() -> None:
    """Compile loops.c if it has changed since it was: an editable install does so only when it is made."""
    spec = importlib.util.spec_from_file_location("hatch_build", BUILD)
    if not BUILD.exists() or spec is None or spec.loader is None:
        return
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    if not all((s.parent / build.library_name(s, platform.machine())).exists() for s in build.SOURCES):
        build.compile_in_place()


def is_further(path: Path) -> bool:
    return path.name in FURTHER or (path.parent.name == "integrations" and path.name not in ADAPTERS)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What `make test` leaves out is not even imported: its frameworks take each process seconds."""
    left = collection_path.name.startswith("test_") and is_further(collection_path)
    return True if left and config.option.markexpr == "not further" else None


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if is_further(item.path):
            item.add_marker("further")
    whole = any("::" in argument for argument in config.args)  # who names a test gets all of it
    if not SOAK and not whole and (out := left_out(items)):
        config.hook.pytest_deselected(items=out)
        left = {id(item) for item in out}
        items[:] = [item for item in items if id(item) not in left]
    order = {name: at for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(LONGEST)))

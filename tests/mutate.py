"""Change one thing in the core, run the tests that reach it, and see whether they notice.

    make mutate                                  # 60 mutants of each package, under a fixed seed
    python tests/mutate.py plan --count 300 --seed 7
    python tests/mutate.py multimodal --like balance.py:2     # only those of its lines 2, 20 to 29, 200 to 299

Mutants are cosmic-ray's: other operators, numbers, comparisons, conditions, decorators. First the package's tests run once
under coverage, which says what test reaches what line and how long it takes. Then each mutant runs in a fork of this
process, which has imported torch already, in a copy of the source: only the tests that reach it, the quickest first, until
one fails; these are tried on the program as it is at the end. Where a test starts processes that cannot say what they reached, it counts as reaching every line.

What only changes an annotation, whether an argument may be given by name, or the size of a cache is not counted. Nor is
what same_programs.py lists. Any other survivor is a wrong program that no test notices: read it, write the test.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import importlib
import itertools
import multiprocessing.util
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import coverage
import hypothesis
import parso  # noqa: F401  (cosmic-ray imports parts of it in an order that fails without the whole)
import pytest
import torch
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

import world
from same_programs import SAME

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "meshfeed"
AT_ONCE = 2
HANG_S = 200
"""A test that takes so long hangs."""
MOST_MEMORY = 8 << 30
"""Bytes that a mutant may map beyond what this process has."""
SLOW = (
    "not no_source_is_ever and not another_process and not many_ranks and not every_small_rank_count "
    "and not all_deliveries and not no_life and not native_patches_are_qwens"
)
"""Tests that take longer than all others together, and find nothing that these do not."""


# The modules of each, and the tests beside them, without what imports Megatron.
PACKAGES: dict[str, tuple[list[str], list[str]]] = {
    "order": (
        ["order/*.py"],
        [
            *(
                f"tests/test_{name}.py"
                for name in ("goldens", "native", "jobs", "amendments", "later_changes")
            ),
            "tests/order",
        ],
    ),
    "plan": (
        ["plan/*.py"],
        [
            *(
                "tests/plan",
                "tests/test_native.py",
                "tests/feed/test_arguments.py",
                "tests/order/test_lanes.py",
            ),
            *("tests/multimodal/test_whole_parts.py", "tests/multimodal/test_encoder_routes.py"),
        ],
    ),
    "sequence": (
        ["sequence/*.py"],
        [
            *("tests/sequence", "tests/outer/cli/test_trace.py", "tests/test_jobs.py"),
            *(
                "tests/feed/test_packed.py",
                "tests/feed/test_device.py",
                "tests/exchange/test_reused_memory.py",
            ),
        ],
    ),
    "multimodal": (
        ["multimodal/*.py", "multimodal/encoders/*.py", "parts/*.py"],
        ["tests/multimodal", "tests/parts", "tests/test_native.py"],
    ),
    "feed": (
        ["feed/*.py"],
        [
            *("tests/feed", "tests/test_simulate.py", "tests/test_jobs.py", "tests/test_ledgers.py"),
            *("tests/test_amendments.py", "tests/order/test_lanes.py"),
            "tests/outer/formats/test_vocabulary.py",
        ],
    ),
    "deliver": (["deliver/*.py"], ["tests/deliver", "tests/exchange/test_exchange.py"]),
    "exchange": (["exchange/*.py"], ["tests/exchange"]),
    "recipe": (
        ["recipe.py", "mixture.py", "batch.py", "summary.py", "state.py"],
        [
            *(
                f"tests/test_{name}.py"
                for name in ("goldens", "recipe_state", "amendments", "jobs", "later_changes")
            ),
            *("tests/test_code_in_fingerprints.py", "tests/feed/test_first_mistakes.py", "tests/order"),
        ],
    ),
}


@dataclass(frozen=True)
class Mutant:
    """The occurrence-th place in a file where an operator applies."""

    path: Path
    operator: str
    occurrence: int
    line: int

    def source(self) -> str | None:
        """The mutated file; None where the mutant is plainly the same program."""
        text = self.path.read_text()
        made = mutate_code(text, get_operator(self.operator)(), self.occurrence)
        return made if made is not None and _program(made) != _program(text) else None

    def change(self, code: str) -> tuple[str, str, str]:
        """The file, its first line that the mutant changes, and what the mutant has there."""
        pairs = zip(self.path.read_text().splitlines(), code.splitlines())
        before, after = next(pair for pair in pairs if pair[0] != pair[1])
        return self.path.relative_to(SOURCE).as_posix(), before.strip(), after.strip()

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} {self.operator.removeprefix('core/')}"


def mutants_of(path: Path) -> Iterator[Mutant]:
    nodes = list(ast_nodes(get_ast(path.read_text())))
    places: dict[str, list[int]] = {}
    for name in operator_names():
        operator = get_operator(name)
        if operator.arguments():
            continue
        # all that replace one binary operator apply to the same places
        kind = name.rpartition("_")[0] if "ReplaceBinaryOperator" in name else name
        if kind not in places:
            found = (start for node in nodes for start, _ in operator().mutation_positions(node))
            places[kind] = [line for line, _ in found]
        for occurrence, line in enumerate(places[kind]):
            yield Mutant(path, name, occurrence, line)


def _program(text: str) -> str | None:
    """The syntax tree without annotations, the kinds of the arguments and the sizes of caches."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, (ast.AnnAssign, ast.arg)):
            node.annotation = ast.Constant(None)
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.keyword) and node.arg in ("maxsize", "most"):
            node.value = ast.Constant(None)
        elif isinstance(node, ast.arguments):
            node.args, node.posonlyargs = [*node.posonlyargs, *node.args, *node.kwonlyargs], []
            node.defaults, node.kwonlyargs, node.kw_defaults = (
                [*node.defaults, *filter(None, node.kw_defaults)],
                [],
                [],
            )
    return ast.dump(tree)


@dataclass
class Reached:
    """What the tests reach, from one run of them all."""

    seconds: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Of each test: by the clock, and of the processor."""
    tests: dict[tuple[str, int], set[str]] = field(default_factory=dict)
    """By file and line; the empty name where an import reaches it."""
    unseen: set[str] = field(default_factory=set)
    """Tests that start processes whose lines nobody sees."""
    imported: list[str] = field(default_factory=list)
    """What the tests import from elsewhere."""

    def by(self, mutant: Mutant) -> list[str]:
        """The tests that reach a mutant, quickest first; then those that may reach it unseen.

        What only an import reaches changes whatever is defined there: then those that reach the smallest definition
        around it that any test reaches.
        """
        file = mutant.path.relative_to(SOURCE).as_posix()
        found: set[str] = set()
        for first, last in _around(mutant.path.read_text(), mutant.line):
            lines = range(first, last + 1)
            found.update(*(self.tests.get((file, line), ()) for line in lines))
            if found != {""}:
                break
        else:
            found = set(self.seconds)
        return sorted((found - {""}) | self.unseen, key=lambda test: (test not in found, self.seconds[test]))


def _around(text: str, line: int) -> list[tuple[int, int]]:
    """First and last line of the statement at a line (of a compound one its head), and of each definition around it."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    spans = [(_first(node), node.end_lineno or node.lineno, node) for node in nodes]
    around = sorted(
        (span for span in spans if span[0] <= line <= span[1]), key=lambda span: span[1] - span[0]
    )
    if not around:
        return [(line, line)]
    first, last, node = around[0]
    body = getattr(node, "body", None)
    head = (first, max(first, _first(body[0]) - 1) if body else last)
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [
        head,
        *(span[:2] for span in around if isinstance(span[2], definitions)),
        (1, len(text.splitlines())),
    ]


def _first(node: ast.stmt) -> int:
    return min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])


class Recorder:
    """A plugin of pytest: which test reaches which line, and how long it takes."""

    def __init__(self, modules: Path, globs: Sequence[str]) -> None:
        self.modules = modules
        self.reached = Reached()
        self.started = modules.parent / "started"
        self.started.mkdir()
        self.test = ""
        self.failed: set[str] = set()
        include = [str(modules / glob) for glob in globs]
        self.coverage = coverage.Coverage(data_file=None, config_file=False, include=include)
        self.coverage.start()
        sys.addaudithook(self._heard)
        multiprocessing.util.register_after_fork(self, Recorder._in_a_child)

    def _heard(self, event: str, _: object) -> None:
        if event == "subprocess.Popen" and self.test:
            self.reached.unseen.add(self.test)

    def _in_a_child(self) -> None:
        """Say that it began; and at its end, unless it is killed, what it reached."""
        path = self.started / f"{os.getpid()}"
        path.write_bytes(pickle.dumps(self.test))
        self.coverage.stop()  # the tracer of this thread, the parent's, would go on with what is erased
        self.coverage.erase()
        self.coverage.start()
        self.coverage.switch_context(self.test)

        def ends() -> None:
            self.coverage.stop()
            path.with_suffix(".lines").write_bytes(pickle.dumps(self._lines()))

        multiprocessing.util.Finalize(None, ends, exitpriority=0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        began, worked = time.monotonic(), time.process_time()
        self.test = item.nodeid
        result = yield
        self.test = ""
        if item.nodeid not in self.failed:
            self.reached.seconds[item.nodeid] = time.monotonic() - began, time.process_time() - worked
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        # another test of the file may have the fixture that this one made
        self.coverage.switch_context(item.nodeid.partition("::")[0])
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        self.coverage.switch_context(item.nodeid)
        return (yield)

    def _lines(self) -> dict[tuple[str, int], list[str]]:
        data = self.coverage.get_data()
        return {
            (Path(file).relative_to(self.modules).as_posix(), line): contexts
            for file in data.measured_files()
            for line, contexts in data.contexts_by_lineno(file).items()
        }

    def save(self, path: Path) -> None:
        self.coverage.stop()
        reached = self.reached
        parts = [self._lines()]
        for begun in self.started.glob("*[0-9]"):
            if (lines := begun.with_suffix(".lines")).exists():
                parts.append(pickle.loads(lines.read_bytes()))
            else:
                reached.unseen.add(pickle.loads(begun.read_bytes()))
        reached.unseen &= {*reached.seconds}
        of_file = defaultdict(set)
        for test in reached.seconds:
            of_file[test.partition("::")[0]].add(test)
        for at, contexts in itertools.chain.from_iterable(part.items() for part in parts):
            tests = reached.tests.setdefault(at, set())
            for context in contexts:
                tests |= of_file.get(context, {context} - self.failed)
        files = {name: getattr(module, "__file__", None) or "" for name, module in [*sys.modules.items()]}
        ours = tuple(
            f"{folder}{os.sep}" for folder in (ROOT / "src", ROOT / "tests", ROOT / "examples", self.modules)
        )
        reached.imported = [name for name, file in files.items() if file and not file.startswith(ours)]
        path.write_bytes(pickle.dumps(reached))


class Chosen:
    """A plugin of pytest: runs these tests alone, in this order, and writes the names of those that fail to a file."""

    def __init__(self, tests: Sequence[str], failed: Path) -> None:
        self.place = {test: at for at, test in enumerate(tests)}
        self.failed = failed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            with self.failed.open("a") as file:
                file.write(f"{report.nodeid}\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self.place), key=lambda item: self.place[item.nodeid]
        )


def forked(job: Callable[[Path], int], seconds: float, log: Path | None = None) -> int:
    """The process, a group of its own, that runs a job on a copy of the source; it exits with what the job returns.

    seconds: of processor time that each of its processes may take.
    log: where it writes.
    """
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setpgid(0, 0)
        out = os.open(log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MOST_MEMORY, mapped + MOST_MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
        _draw_few()
        torch.set_num_threads(1)  # no threads, which a fork would lose
        world.context = multiprocessing.get_context("fork")  # ranks that have the mutant
        with tempfile.TemporaryDirectory() as folder:
            modules = Path(folder) / SOURCE.name
            shutil.copytree(SOURCE, modules)
            sys.path.insert(0, folder)
            os.environ["PYTHONPATH"] = folder  # of other processes
            code = job(modules)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _draw_few() -> None:
    """Let properties try twenty examples at most and not look for the least one that fails."""
    real = hypothesis.settings.__init__

    def few(self: hypothesis.settings, *args: Any, **options: Any) -> None:
        options["phases"] = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        options["max_examples"] = min(options.get("max_examples", 20), 20)
        real(self, *args, **options)

    hypothesis.settings.__init__ = few


def _pytest(plugin: object, files: Sequence[str], *options: str) -> int:
    arguments = ["-q", "-n0", "-p", "no:cacheprovider", f"--timeout={HANG_S}", "-k", SLOW, *options, *files]
    return int(pytest.main(arguments, plugins=[plugin])) % pytest.ExitCode.NO_TESTS_COLLECTED


def _end_group(child: int) -> None:
    """End a process and what it leaves behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)


def record(globs: Sequence[str], tests: Sequence[str]) -> Reached:
    """Run the tests on the program as it is. Those that fail are told, and no mutant meets them."""
    with tempfile.TemporaryDirectory() as folder:
        reached, log = Path(folder) / "reached", Path(folder) / "log"

        def job(modules: Path) -> int:
            recorder = Recorder(modules, globs)
            _pytest(recorder, tests)
            recorder.save(reached)
            if recorder.failed:
                print("fail without a mutant, and are left out:", *sorted(recorder.failed), sep="\n  ")
            return len(recorder.failed)

        child = forked(job, 3600, log)
        _, status = os.waitpid(child, 0)
        _end_group(child)
        if status:
            print(log.read_text()[-4000:], flush=True)
        return pickle.loads(reached.read_bytes())


def start(
    change: tuple[Mutant, str] | None, tests: Sequence[str], seconds: float, failed: Path, *options: str
) -> int:
    """The process that runs tests on a mutant, or on the program as it is; it exits with 0 if all pass.

    failed: where it writes the names of those that do not.
    """

    def job(modules: Path) -> int:
        if change is not None:
            path = modules / change[0].path.relative_to(SOURCE)
            path.write_text(change[1])
            for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
                compiled.unlink()
        files = dict.fromkeys(test.partition("::")[0] for test in tests)
        return _pytest(Chosen(tests, failed), [*files], *options)

    return forked(job, seconds)


@dataclass
class Tally:
    """The outcomes of a package's mutants."""

    killed: int = 0
    survived: int = 0
    same: int = 0
    """Listed as the same program, and not tried."""

    def __str__(self) -> str:
        tried = self.killed + self.survived
        return f"{self.killed:4} of {tried:3} killed  {self.killed / max(1, tried):.2f}   {self.same:2} the same program"


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: "killed" or "timeout" if the tests noticed it; and by which test, if one failed."""

    what: str
    mutant: Mutant
    code: str
    test: str = ""

    def __str__(self) -> str:
        text = f"{self.what:9} {self.mutant}"
        if self.what in ("killed", "timeout"):
            return text
        return "\n    ".join([text, *self.mutant.change(self.code)[1:]])


def outcomes(mutants: Iterator[tuple[Mutant, str]], reached: Reached, folder: Path) -> Iterator[Outcome]:
    """That of each mutant, as it ends."""
    running: dict[int, tuple[Mutant, str, Path, float]] = {}
    for number in itertools.count():
        while len(running) < AT_ONCE and (made := next(mutants, None)):
            if not (tests := reached.by(made[0])):
                yield Outcome("UNREACHED", *made)
                continue
            by_clock, worked = (5 * sum(each) for each in zip(*(reached.seconds[test] for test in tests)))
            failed = folder / f"{number}-{len(running)}"
            child = start(made, tests, 20 + worked, failed, "-x")
            running[child] = *made, failed, time.monotonic() + 60 + by_clock
        if not running:
            return
        for child, (mutant, code, failed, deadline) in [*running.items()]:
            ended, status = os.waitpid(child, os.WNOHANG)
            late = not ended and time.monotonic() > deadline
            if not ended and not late:
                continue
            _end_group(child)
            if late:
                os.waitpid(child, 0)
            del running[child]
            signals = (signal.SIGXCPU, signal.SIGKILL)
            slow = late or (os.WIFSIGNALED(status) and os.WTERMSIG(status) in signals)
            what = "timeout" if slow else "killed" if status else "SURVIVED"
            yield Outcome(what, mutant, code, failed.read_text().split("\n")[0] if failed.exists() else "")
        time.sleep(0.02)


def untrue(tests: Sequence[str], reached: Reached, folder: Path) -> set[str]:
    """Those of some tests that fail on the program as it is, where mutants meet them."""
    failed = folder / "untrue"
    seconds = 60 + 5 * sum(reached.seconds[test][1] for test in tests)
    if tests:
        os.waitpid(child := start(None, tests, seconds, failed), 0)
        _end_group(child)
    return set(failed.read_text().split("\n")) - {""} if failed.exists() else set()


def tally(globs: Sequence[str], tests: Sequence[str], count: int, seed: int, like: str) -> Tally:
    result = Tally()
    reached = record(globs, tests)
    for name in reached.imported:  # once, before all forks
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    every = [mutant for glob in globs for path in sorted(SOURCE.glob(glob)) for mutant in mutants_of(path)]
    random.Random(seed).shuffle(every)

    def chosen() -> Iterator[tuple[Mutant, str]]:
        tried = 0
        for mutant in every:
            if tried == count:
                return
            if like not in str(mutant) or (code := mutant.source()) is None:
                continue
            if mutant.change(code) in SAME:
                result.same += 1
                continue
            tried += 1
            yield mutant, code

    with tempfile.TemporaryDirectory() as folder:
        found: list[Outcome] = []
        for outcome in outcomes(chosen(), reached, Path(folder)):
            found.append(outcome)
            print(outcome, flush=True)
        false = untrue(sorted({each.test for each in found} - {""}), reached, Path(folder))
    for each in found:
        if each.test in false:
            each = replace(each, what="UNNOTICED")
            print(f"{each}\n    but {each.test} fails without it too", flush=True)
        noticed = each.what in ("killed", "timeout")
        result.killed += noticed
        result.survived += not noticed
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("packages", nargs="*", default=[*PACKAGES], choices=[*PACKAGES, []])
    parser.add_argument("--count", type=int, default=60, help="mutants of each package")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--like", default="", help="only mutants whose line of output has this text")
    parser.add_argument("--tests", nargs="*", help="files to run instead of the package's")
    asked = parser.parse_args()
    os.chdir(ROOT)
    tallies: dict[str, Tally] = {}
    for name in asked.packages:
        globs, tests = PACKAGES[name]
        tallies[name] = tally(globs, asked.tests or tests, asked.count, asked.seed, asked.like)
        print(f"{name:9} {tallies[name]}", flush=True)
    if len(tallies) > 1:
        print("\n".join(["", *(f"{name:9} {each}" for name, each in tallies.items())]))


if __name__ == "__main__":
    main()

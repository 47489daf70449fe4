"""What Lightning's habits make of a data module, in one process."""

from __future__ import annotations

import inspect
import pickle
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import loops
import meshfeed as mf
from loops import recipe
from meshfeed.integrations import lightning as fed
from soak import some


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def held_out(corpus: str, steps: int = 2) -> mf.Recipe:
    return recipe(corpus, shuffle="none", epochs=1, steps=steps)


def model() -> Any:
    """One weight, and the rows of every batch by stage."""
    import lightning.pytorch as pl

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))
            self.losses: list[torch.Tensor] = []
            self.seen: dict[str, list[Any]] = {"train": [], "validate": [], "test": []}

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            self.seen["train"].append(loops.rows(batch["tokens"]))
            loss = (self.weight.sum() - batch["tokens"].double().mean()) ** 2
            self.losses.append(loss.detach())
            return loss

        def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
            self.seen["validate"].append((dataloader_idx, loops.rows(batch["tokens"])))

        def test_step(self, batch: Any, index: int) -> None:
            self.seen["test"].append(loops.rows(batch["tokens"]))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    return Model()


def trainer(tmp_path: Path, **options: Any) -> Any:
    import lightning.pytorch as pl

    given = {"accumulate_grad_batches": 4, "max_steps": 3, "num_sanity_val_steps": 0, **options}
    return pl.Trainer(
        accelerator="cpu",
        default_root_dir=tmp_path,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **given,
    )


def rows(corpus: str, steps: range, **options: Any) -> list[Any]:
    made = loops.wanted(corpus, steps, 0, window=32, sequences=8, dp=1, **options)
    return [each for _, each in made]


def test_only_training_resumes(corpus: str, tmp_path: Path) -> None:
    data = fed.DataModule(recipe(corpus), held_out(corpus), held_out(corpus, 1), micro_batch_size=2)
    first = trainer(tmp_path, limit_val_batches=3)
    first.fit(model(), datamodule=data)
    first.save_checkpoint(tmp_path / "three.ckpt")  # after fit: the place is kept

    data = fed.DataModule(
        recipe(corpus), [held_out(corpus), held_out(corpus, 1)], held_out(corpus, 1), micro_batch_size=2
    )
    evaluated, again = trainer(tmp_path), model()
    evaluated.validate(again, datamodule=data, ckpt_path=tmp_path / "three.ckpt", verbose=False)
    evaluated.test(again, datamodule=data, ckpt_path=tmp_path / "three.ckpt", verbose=False)
    two, one = rows(corpus, range(2), shuffle="none"), rows(corpus, range(1), shuffle="none")
    assert again.seen["validate"] == [*((0, each) for each in two), *((1, each) for each in one)]
    assert again.seen["test"] == one
    assert data.state_dict() == {}  # a checkpoint loaded to evaluate moves nothing

    trained = model()
    trainer(tmp_path, max_steps=5).fit(trained, datamodule=data, ckpt_path=tmp_path / "three.ckpt")
    assert trained.seen["train"] == rows(corpus, range(3, 5))


def test_an_encoder_is_for_sets_with_parts(corpus: str, tmp_path: Path) -> None:
    data = fed.DataModule(recipe(corpus), held_out(corpus), micro_batch_size=2, encoder="balanced")
    trainer(tmp_path).validate(model(), datamodule=data, verbose=False)
    with pytest.raises(mf.errors.OptionError, match="has no encoder; leave it out"):
        trainer(tmp_path).fit(model(), datamodule=data)


def test_a_ledger_amends_training_alone(corpus: str, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    mf.amendments.Ledger((mf.amendments.Amendment(0, mf.amendments.SkipSteps(0, 1)),)).write(ledger)
    data = fed.DataModule(
        recipe(corpus), held_out(corpus), held_out(corpus), micro_batch_size=2, ledger=str(ledger)
    )
    trained, two = model(), rows(corpus, range(2), shuffle="none")
    trainer(tmp_path).fit(trained, datamodule=data)
    trainer(tmp_path).test(trained, datamodule=data, verbose=False)
    trainer(tmp_path).validate(trained, datamodule=data, verbose=False)
    assert trained.seen["train"] == rows(corpus, range(1, 4)) and trained.seen["test"] == two
    assert trained.seen["validate"] == [(0, each) for each in two]
    assert len(mf.amendments.Ledger.read(ledger)) == 1


def test_a_run_log_has_the_steps_of_training_alone(corpus: str, tmp_path: Path) -> None:
    log = mf.metrics.RunLog(tmp_path / "log")
    data = fed.DataModule(recipe(corpus), held_out(corpus), micro_batch_size=2, metrics=log)
    trainer(tmp_path, max_steps=3, val_check_interval=4).fit(model(), datamodule=data)
    run = mf.report.read_run(tmp_path / "log")
    assert len(run.starts) == 1 and run.ranks[0].step.tolist()[:3] == [0, 1, 2]


def test_a_job_that_was_amended_resumes_with_its_ledger(corpus: str, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    mf.amendments.Ledger((mf.amendments.Amendment(0, mf.amendments.SkipSteps(1, 2)),)).write(ledger)

    def data() -> fed.DataModule:
        return fed.DataModule(recipe(corpus), micro_batch_size=2, ledger=str(ledger))

    first, then = trainer(tmp_path, max_steps=2), model()
    first.fit(model(), datamodule=data())
    first.save_checkpoint(tmp_path / "two.ckpt")
    trainer(tmp_path, max_steps=4).fit(then, datamodule=data(), ckpt_path=tmp_path / "two.ckpt")
    assert then.seen["train"] == rows(corpus, range(3, 5))


def test_epochs_go_on_where_the_last_one_ended(corpus: str, tmp_path: Path) -> None:
    for options, limits in (({"steps_per_epoch": 2}, {}), ({}, {"limit_train_batches": 8})):
        trained = model()
        data = fed.DataModule(recipe(corpus), micro_batch_size=2, **options)
        trainer(tmp_path, max_steps=-1, max_epochs=3, **limits).fit(trained, datamodule=data)
        assert trained.seen["train"] == rows(corpus, range(6))


def test_an_epoch_that_ends_within_a_step_is_refused(corpus: str, tmp_path: Path) -> None:
    data = fed.DataModule(recipe(corpus), micro_batch_size=2)
    run = trainer(tmp_path, max_steps=-1, max_epochs=1, limit_train_batches=6)
    with pytest.raises(mf.errors.RecipeError, match=r"limit_train_batches=6: .* would have 2; give 4 or"):
        run.fit(model(), datamodule=data)
    short = fed.DataModule(recipe(corpus, steps=1), micro_batch_size=2)
    trainer(tmp_path, max_steps=-1, max_epochs=1, limit_train_batches=6).fit(model(), datamodule=short)
    both = trainer(tmp_path, max_steps=-1, max_epochs=2, limit_train_batches=4)
    epochs = fed.DataModule(recipe(corpus), micro_batch_size=2, steps_per_epoch=3)
    with pytest.raises(
        mf.errors.RecipeError, match=r"limit_train_batches=4 is less than the 12 microbatches"
    ):
        both.fit(model(), datamodule=epochs)
    trainer(tmp_path, max_steps=-1, max_epochs=1, limit_train_batches=4).fit(model(), datamodule=epochs)


def test_a_stream_with_an_end_is_one_epoch_and_has_a_length(corpus: str, tmp_path: Path) -> None:
    data, trained = fed.DataModule(recipe(corpus, steps=3), micro_batch_size=2), model()
    run = trainer(tmp_path, max_steps=-1, max_epochs=1)
    run.fit(trained, datamodule=data)
    assert run.num_training_batches == 12 and run.global_step == 3
    assert trained.seen["train"] == rows(corpus, range(3))


@pytest.mark.parametrize(
    ("options", "accumulate", "said"),
    [
        (
            {},
            3,
            r"step 0 is 8 sequences, 4 microbatches on each of 1 .*\(micro_batch_size=2\), but "
            r"accumulate_grad_batches is 3, for 6 sequences; make accumulate_grad_batches 4, or .*sequences=6",
        ),
        # the last step, known before the first is trained
        ({"epochs": 1}, 4, "step 23 is 3 sequences, 2 microbatches .*ends within a step.*last='drop'"),
        ({"batch": mf.Batch(sequences=8).then(2, 16)}, 4, "step 2 is 16 sequences, 8 microbatches"),
        ({"sequence": mf.Documents()}, 1, "packed into . microbatches.*Packing\\(microbatches=1\\)"),
    ],
)
def test_steps_and_accumulation_must_agree(
    corpus: str, tmp_path: Path, options: dict[str, Any], accumulate: int, said: str
) -> None:
    more = {"packing": mf.Packing(capacity=200)} if "sequence" in options else {"micro_batch_size": 2}
    data = fed.DataModule(recipe(corpus, **options), **more)
    with pytest.raises(mf.errors.RecipeError, match=said):
        trainer(tmp_path, accumulate_grad_batches=accumulate).fit(model(), datamodule=data)


def saving(tmp_path: Path) -> Any:
    """A callback that saves after every batch and every validation."""
    import lightning.pytorch as pl

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"{trainer.fit_loop.total_batch_idx + 1}.ckpt")

        def on_validation_end(self, trainer: Any, *args: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"{trainer.fit_loop.total_batch_idx + 1}-validated.ckpt")

    return Save()


@some(1)
@pytest.mark.parametrize("steps_per_epoch", [None, 1, 2])
def test_a_checkpoint_from_within_a_step_goes_on_at_its_beginning(
    corpus: str, tmp_path: Path, steps_per_epoch: int | None
) -> None:
    def data() -> Any:
        given = {"micro_batch_size": 2, "steps_per_epoch": steps_per_epoch}
        return fed.DataModule(recipe(corpus), held_out(corpus, 1), **given)

    whole, checked = model(), {"check_val_every_n_epoch": None, "val_check_interval": 3}
    trainer(tmp_path, callbacks=[saving(tmp_path)], **checked).fit(whole, datamodule=data())
    assert len({value.item() for value in whole.losses}) == 12
    saves = sorted(tmp_path.glob("*.ckpt"))
    assert len(saves) == 12 + 4
    for saved in saves:
        resumed, run = model(), trainer(tmp_path, **checked)
        run.fit(resumed, datamodule=data(), ckpt_path=saved)
        begun = int(saved.stem.partition("-")[0]) // 4 * 4
        assert resumed.seen["train"] == whole.seen["train"][begun:], saved
        assert resumed.losses == whole.losses[begun:], saved
        assert torch.equal(resumed.weight, whole.weight)
        assert (run.global_step, run.fit_loop.total_batch_idx) == (3, 11)


def test_by_hand_no_checkpoint_is_taken_within_a_step(corpus: str, tmp_path: Path) -> None:
    class ByHand(type(model())):
        automatic_optimization = False

        def training_step(self, batch: Any, index: int) -> None:
            self.manual_backward(super().training_step(batch, index))

    run = trainer(tmp_path, callbacks=[saving(tmp_path)], accumulate_grad_batches=1)
    with pytest.raises(
        mf.errors.StateError, match=r"after 1 microbatches of step 0, under manual optim.*every_n_train"
    ):
        run.fit(ByHand(), datamodule=fed.DataModule(recipe(corpus), micro_batch_size=2))


def test_another_recipe_is_refused(corpus: str, tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.fit(model(), datamodule=fed.DataModule(recipe(corpus), micro_batch_size=2))
    run.save_checkpoint(tmp_path / "state.ckpt")
    other = fed.DataModule(recipe(corpus, seed=1), micro_batch_size=2)
    with pytest.raises(mf.errors.StateError, match="another recipe"):
        trainer(tmp_path).fit(model(), datamodule=other, ckpt_path=tmp_path / "state.ckpt")
    with pytest.raises(mf.errors.RecipeError, match="DataModule\\(train=recipe\\)"):
        trainer(tmp_path).fit(model(), datamodule=fed.DataModule())


@pytest.mark.parametrize(
    ("role", "limit"), [("validate", "limit_val_batches"), ("test", "limit_test_batches")]
)
def test_an_evaluation_without_end_is_refused(corpus: str, tmp_path: Path, role: str, limit: str) -> None:
    data = fed.DataModule(recipe(corpus), **{role: recipe(corpus)}, micro_batch_size=2)
    with pytest.raises(mf.errors.RecipeError, match=f"{role} never ends; .*{limit}="):
        getattr(trainer(tmp_path), role)(model(), datamodule=data)
    limited = model()
    getattr(trainer(tmp_path, **{limit: 2}), role)(limited, datamodule=data)
    assert len(limited.seen[role]) == 2


def test_no_epoch_begins_after_the_end_of_the_stream(corpus: str, tmp_path: Path) -> None:
    def data(**options: Any) -> Any:
        return fed.DataModule(recipe(corpus, steps=3), micro_batch_size=2, **options)

    for options, epochs in (({}, 2), ({"steps_per_epoch": 2}, 3)):
        trained = model()
        with pytest.raises(
            mf.errors.RecipeError, match="ended after 3 steps, and another epoch would be empty"
        ):
            trainer(tmp_path, max_steps=-1, max_epochs=epochs).fit(trained, datamodule=data(**options))
        assert trained.seen["train"] == rows(corpus, range(3))

    untouched = model()
    with pytest.raises(mf.errors.RecipeError, match=r"max_steps=4, 0 of .* only 3 more; set max_steps=3"):
        trainer(tmp_path, max_steps=4).fit(untouched, datamodule=data())
    assert not untouched.seen["train"]
    ended, run = data(), trainer(tmp_path)
    run.fit(model(), datamodule=ended)
    run.save_checkpoint(tmp_path / "end.ckpt")
    with pytest.raises(mf.errors.RecipeError, match="would be empty"):
        trainer(tmp_path, max_steps=-1, max_epochs=1).fit(untouched, datamodule=ended)
    trainer(tmp_path).fit(untouched, datamodule=data(), ckpt_path=tmp_path / "end.ckpt")  # nothing left to do
    assert not untouched.seen["train"]


def test_the_rest_of_a_stream_is_validated_too(corpus: str, tmp_path: Path) -> None:
    data = fed.DataModule(recipe(corpus, steps=4), held_out(corpus, 1), micro_batch_size=2)
    trainer(tmp_path, max_steps=1).fit(model(), datamodule=data)
    rest = model()
    trainer(tmp_path, max_steps=-1, max_epochs=1).fit(rest, datamodule=data)
    assert rest.seen["train"] == rows(corpus, range(1, 4))
    assert len(rest.seen["validate"]) == 4


# in the order of Lightning's documentation
NOT_DATA = frozenset(
    [
        *(
            "self",
            "accelerator",
            "precision",
            "logger",
            "callbacks",
            "log_every_n_steps",
            "enable_checkpointing",
        ),
        *("enable_progress_bar", "enable_model_summary", "gradient_clip_val", "gradient_clip_algorithm"),
        *(
            "deterministic",
            "benchmark",
            "inference_mode",
            "profiler",
            "detect_anomaly",
            "barebones",
            "plugins",
        ),
        *("sync_batchnorm", "default_root_dir", "enable_autolog_hparams", "model_registry"),
    ]
)
"""What steers the model, the machine, logs and checkpoints."""


def test_every_option_is_known() -> None:
    import lightning.pytorch as pl

    there = set(inspect.signature(pl.Trainer.__init__).parameters)
    assert there == fed.CONFIG_FIELDS.keys() | NOT_DATA and not fed.CONFIG_FIELDS.keys() & NOT_DATA


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_distributed_sampler": False},
        {"min_epochs": 2},
        {"min_steps": 1},
        {"max_time": {"hours": 1}},
        {"num_sanity_val_steps": 1},
        {"val_check_interval": 4, "check_val_every_n_epoch": None},
        {"val_check_interval": 0.5},
    ],
)
def test_other_options_keep_the_data(corpus: str, tmp_path: Path, options: dict[str, Any]) -> None:
    data = fed.DataModule(recipe(corpus), held_out(corpus, 1), micro_batch_size=2, steps_per_epoch=2)
    trained = model()
    trainer(tmp_path, max_steps=4, **options).fit(trained, datamodule=data)
    assert trained.seen["train"] == rows(corpus, range(4))
    one = [(0, each) for each in rows(corpus, range(1), shuffle="none")]
    sanity = options.get("num_sanity_val_steps", 0)
    passes = 2 * (2 if "val_check_interval" in options else 1)
    assert trained.seen["validate"] == one[:sanity] + one * passes


def test_shares_of_a_stream_are_refused(corpus: str, tmp_path: Path) -> None:
    for options, said in (
        ({"limit_train_batches": 0.5}, "limit_train_batches=0.5: .* multiple of"),
        ({"overfit_batches": 4}, r"leave them out: overfit_batches=4 \(a stream does not repeat"),
        ({"overfit_batches": 0.5}, "overfit_batches=0.5"),
        ({"reload_dataloaders_every_n_epochs": 1}, "leave them out: reload_dataloaders_every_n_epochs=1"),
    ):
        for given in ({}, {"steps": 4}):
            data = fed.DataModule(recipe(corpus, **given), held_out(corpus), micro_batch_size=2)
            with pytest.raises(mf.errors.RecipeError, match=said):
                trainer(tmp_path, **options).fit(model(), datamodule=data)


@pytest.mark.parametrize("role", ["validate", "test"])
def test_a_role_without_a_recipe_is_refused(corpus: str, tmp_path: Path, role: str) -> None:
    for given in ({}, {role: []}):
        with pytest.raises(
            mf.errors.RecipeError, match=rf"{role} needs a recipe: DataModule\({role}=recipe\)"
        ):
            getattr(trainer(tmp_path), role)(model(), datamodule=fed.DataModule(recipe(corpus), **given))


def fed_threads() -> int:
    return sum(thread.name == "meshfeed-prefetch" for thread in threading.enumerate())


def test_a_fit_that_fails_gives_its_place_back(corpus: str, tmp_path: Path) -> None:
    class Failing(type(model())):
        def __init__(self, stage: str, after: int) -> None:
            super().__init__()
            self.stage, self.after = stage, after

        def fail(self, stage: str) -> None:
            if stage == self.stage and len(self.seen[stage]) == self.after:
                raise ValueError(f"mine, in {stage}")

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            self.fail("train")
            return super().training_step(batch, index)

        def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
            self.fail("validate")
            super().validation_step(batch, index)

    data = fed.DataModule(
        recipe(corpus), held_out(corpus), micro_batch_size=2, transport=mf.Transport(prefetch=2)
    )
    before = fed_threads()
    for failing in (Failing("train", 6), Failing("validate", 1)):  # within step 1; after it, in validation
        run = trainer(
            tmp_path, check_val_every_n_epoch=None, val_check_interval=4 if failing.after == 1 else 400
        )
        with pytest.raises(ValueError, match="mine") as failed:
            run.fit(failing, datamodule=data)
        assert fed_threads() == before, "though the traceback is still held"
        del failed
    again = model()
    trainer(tmp_path).fit(again, datamodule=data)
    assert again.seen["train"] == rows(corpus, range(2, 5))


def test_a_learning_rate_is_found_and_nothing_is_skipped(corpus: str, tmp_path: Path) -> None:
    from lightning.pytorch.tuner import Tuner

    class Tuned(type(model())):
        lr = 0.1

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    data, tuned, run = fed.DataModule(recipe(corpus), micro_batch_size=2), Tuned(), trainer(tmp_path)
    found = Tuner(run).lr_find(tuned, datamodule=data, num_training=4)
    assert len(found.results["lr"]) == 4 and tuned.seen["train"] == rows(corpus, range(4))
    tuned.seen["train"].clear()
    run.fit(tuned, datamodule=data)
    assert tuned.seen["train"] == rows(corpus, range(3)), "what was only tried comes again"


def test_a_batch_size_that_would_change_nothing_is_not_searched(corpus: str, tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import BatchSizeFinder
    from lightning.pytorch.tuner import Tuner

    tried, data = model(), fed.DataModule(recipe(corpus), micro_batch_size=2)
    tried.batch_size = 2
    with pytest.raises(
        mf.errors.RecipeError, match=r"Tuner.scale_batch_size.* DataModule\(micro_batch_size=\)"
    ):
        Tuner(trainer(tmp_path)).scale_batch_size(tried, datamodule=data, max_trials=1)
    with pytest.raises(mf.errors.RecipeError, match="BatchSizeFinder"):
        trainer(tmp_path, callbacks=[BatchSizeFinder(max_trials=1)]).fit(tried, datamodule=data)
    assert tried.batch_size == 2 and not tried.seen["train"]


def test_what_no_feed_takes_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="argument 'micro_batch_sizes'"):
        fed.DataModule(micro_batch_sizes=2)
    with pytest.raises(TypeError, match="argument 'rank'"):
        fed.DataModule(rank=2)


def test_a_fast_development_run_takes_what_it_takes(corpus: str, tmp_path: Path) -> None:
    data = fed.DataModule(recipe(corpus), held_out(corpus), micro_batch_size=2)
    for options in ({"fast_dev_run": True}, {"fast_dev_run": 3}, {"num_sanity_val_steps": 1}):
        trained = model()
        trainer(tmp_path, **options).fit(trained, datamodule=data)
        assert trained.seen["train"]


def test_a_data_module_is_an_ordinary_class(corpus: str) -> None:
    import lightning.pytorch as pl

    class Mine(fed.DataModule):
        pass

    assert isinstance(Mine(), pl.LightningDataModule) and issubclass(Mine, fed.DataModule)
    sent = pickle.loads(pickle.dumps(fed.DataModule(recipe(corpus))))  # as strategies that spawn do
    assert type(sent) is fed.DataModule and sent.state_dict() == {}
    with pytest.raises(AttributeError, match="no attribute 'DataModul'"):
        fed.DataModul  # noqa: B018


@pytest.mark.parametrize("stop", [None, 5, 6], ids=lambda stop: f"stop={stop}")
@pytest.mark.parametrize("steps_per_epoch", [None, 1, 3])
def test_a_step_begins_where_accumulation_begins(
    corpus: str, tmp_path: Path, steps_per_epoch: int | None, stop: int | None
) -> None:
    """However many batches the run that saved had trained, of whatever size, and wherever it stopped."""

    class Counting(type(model())):
        """Gradients are the mean over a step of how often each token is in a sequence."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(loops.VOCAB, dtype=torch.float64))
            self.steps: list[torch.Tensor] = []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            self.seen["train"].append(index)
            self.trainer.should_stop |= len(self.seen["train"]) == stop
            return (self.weight * counts(batch["tokens"])).sum()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.steps.append(self.weight.grad.clone())

    def counts(tokens: torch.Tensor) -> torch.Tensor:
        return torch.bincount(tokens.flatten(), minlength=loops.VOCAB) / len(tokens)

    def data(size: int) -> Any:
        given: dict[str, Any] = {"micro_batch_size": size, "steps_per_epoch": steps_per_epoch}
        return fed.DataModule(recipe(corpus), held_out(corpus), **given)

    checked: dict[str, Any] = {"check_val_every_n_epoch": None, "val_check_interval": 3}
    first = trainer(tmp_path, accumulate_grad_batches=4, **checked)
    first.fit(Counting(), datamodule=data(2))
    first.save_checkpoint(tmp_path / "saved.ckpt")  # after the fit, and perhaps within a step
    begun = 3 if stop is None else 1
    made = mf.simulate(recipe(corpus), mf.Layout(), range(begun, begun + 3), micro_batch_size=8)
    wanted = [counts(step.microbatches[0]["tokens"]) for step in made]
    for size in (1, 2, 4):
        resumed = Counting()
        again = trainer(tmp_path, max_steps=begun + 3, accumulate_grad_batches=8 // size, **checked)
        stop = None
        again.fit(resumed, datamodule=data(size), ckpt_path=tmp_path / "saved.ckpt")
        torch.testing.assert_close(torch.stack(resumed.steps), torch.stack(wanted).double())


@pytest.mark.parametrize(
    "limits", [{"steps_per_epoch": 2}, {}], ids=["steps_per_epoch", "limit_train_batches"]
)
def test_a_checkpoint_around_the_end_of_an_epoch_goes_on_with_the_next(
    corpus: str, tmp_path: Path, limits: dict[str, int]
) -> None:
    def data(size: int = 2) -> Any:
        return fed.DataModule(recipe(corpus), held_out(corpus, 1), micro_batch_size=size, **limits)

    limit = {} if limits else {"limit_train_batches": 8}
    options: dict[str, Any] = {"max_steps": -1, "max_epochs": 3, **limit}
    trainer(tmp_path, callbacks=[saving(tmp_path)], **options).fit(model(), datamodule=data())
    for name in ("8", "8-validated", "16", "16-validated"):
        resumed, run = model(), trainer(tmp_path, **options)
        run.fit(resumed, datamodule=data(), ckpt_path=tmp_path / f"{name}.ckpt")
        assert resumed.seen["train"] == rows(corpus, range(int(name.partition("-")[0]) // 4, 6)), name
        assert (run.global_step, run.current_epoch) == (6, 3)
        again, run = model(), trainer(tmp_path, accumulate_grad_batches=2, **{**options, **half(limit)})
        run.fit(again, datamodule=data(4), ckpt_path=tmp_path / f"{name}.ckpt")
        flat = [row for batch in again.seen["train"] for row in batch]
        assert flat == [row for batch in resumed.seen["train"] for row in batch], name
        assert (run.global_step, run.current_epoch) == (6, 3)


def half(limits: dict[str, int]) -> dict[str, int]:
    return {name: limit // 2 for name, limit in limits.items()}


def test_ranks_that_a_strategy_counts_as_one_replica_get_no_data_of_their_own(
    corpus: str, tmp_path: Path
) -> None:
    from lightning.pytorch.strategies import SingleDeviceStrategy

    class Shares(SingleDeviceStrategy):
        """Two replicas in a job of one rank, as one of tensor parallelism without a mesh has fewer than ranks."""

        @property
        def distributed_sampler_kwargs(self) -> dict[str, int]:
            return {"num_replicas": 2, "rank": 0}

    data = fed.DataModule(recipe(corpus), micro_batch_size=2)
    with pytest.raises(mf.errors.LayoutError, match=r"Shares counts 2 replicas of 1 ranks.*layout="):
        trainer(tmp_path, strategy=Shares("cpu")).fit(model(), data)
    told = fed.DataModule(recipe(corpus), layout=mf.Layout(), micro_batch_size=2)
    trainer(tmp_path, strategy=Shares("cpu")).fit(model(), told)

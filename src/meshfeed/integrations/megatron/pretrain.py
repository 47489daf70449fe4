"""Megatron-LM's own `pretrain`: the provider of its training, validation and test data."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Self

from meshfeed.errors import RecipeError, StateError
from meshfeed.feed import Feed
from meshfeed.integrations.loader import field_names, framework, refuse_options
from meshfeed.integrations.megatron.batches import StageIterator
from meshfeed.integrations.megatron.feeds import feed
from meshfeed.integrations.megatron.iterations import iterators_of_stages, skipped_of, unfollowed_iterators
from meshfeed.integrations.megatron.stages import Readers
from meshfeed.plan import Packing
from meshfeed.recipe import Blocks, Recipe
from meshfeed.transport import Transport

CONFIG_FIELDS: dict[str, str] = {
    "--dataloader-type": "honoured: it must be external",
    "--micro-batch-size": "honoured: rows of a microbatch; packs are made by `packing=`",
    "--global-batch-size": "honoured: a step of another size is refused; with packs, a step of another "
    "number of microbatches",
    "--rampup-batch-size": "honoured: up to Megatron-core 0.17, where `Batch.then` makes the same ramp; "
    "later versions ignore it, with a warning: use --step-batch-size-schedule",
    "--step-batch-size-schedule": "honoured: a step of another size is refused; `batch_of_schedule` makes "
    "its Batch",
    "--train-iters": "honoured: a recipe that ends earlier is refused",
    "--train-samples": "honoured: a recipe that ends earlier is refused",
    "--seq-length": "honoured: rows of another length are refused; packs, where a pipeline without "
    "variable_seq_lengths sends them. No effect on other packs: see `Packing(capacity=)`",
    "--encoder-seq-length": "honoured: Megatron takes it as its --seq-length",
    "--vocab-size": "honoured: tokens are checked against it, padded; `vocab_size=None` turns that off",
    "--load": "honoured: training begins at the checkpoint's iteration, after its consumed samples",
    "--iterations-to-skip": "honoured: their steps are left out on every rank; not with virtual stages. It "
    "must name what a ledger's `SkipSteps` leave out, too",
    "--eval-iters": "honoured: without `valid=` it must be 0",
    "--eval-interval": "honoured: each evaluation continues where the last one ended",
    "--start-eval-at-iter": "honoured: earlier evaluations take nothing of `valid`",
    "--eval-global-batch-size": "honoured: as --global-batch-size, in `valid` and `test`",
    "--eval-micro-batch-size": "honoured: rows of a microbatch of `valid` and `test`",
    "--skip-train": "honoured: `train` is not opened, and `valid` begins at its first step",
    "--reset-position-ids": "honoured: the recipe's rule must say the same; refused for packs",
    "--reset-attention-mask": "honoured: the recipe's rule must say the same; refused for packs",
    "--eod-mask-loss": "honoured: the recipe's rule must say the same; refused for packs",
    "--dataloader-inter-document-masking": "honoured: the recipe's rule must have reset_attention_mask; "
    "refused for packs",
    "--full-validation": "refused: give `valid=` and --eval-iters",
    "--multiple-validation-sets": "refused: train on one `valid=`; give a mixture",
    "--data-path": "refused: name the data in the recipe",
    "--train-data-path": "refused: name the data in the recipe",
    "--valid-data-path": "refused: name the data in the recipe",
    "--test-data-path": "refused: name the data in the recipe",
    "--data-args-path": "refused: name the data in the recipe",
    "--per-split-data-args-path": "refused: name the data in the recipe",
    "--mock-data": "refused: name the data in the recipe",
    "--fim-data": "refused: give tokens in that form; its other options, such as --fim-rate, need it",
    "--sft": "refused: use `mf.Documents` or `mf.Samples` with a `Packing`",
    "--use-varlen-dataset": "refused: use `mf.Documents` or `mf.Samples` with a `Packing`; its other "
    "options, such as --varlen-sbhd-validation and --varlen-mock-dataset-config-json, need it, as "
    "--sft-mock-dataset-config-json needs --sft",
    "--allow-ambiguous-pad-tokens": "refused: padding tokens in the data bear loss; a column `loss_mask` "
    "says otherwise",
    "--logits-load-dir": "honoured: rows are dealt as by Megatron's sampler, for any number of data-parallel "
    "ranks; packs and a shuffle by blocks, which are not, are refused",
    "--perform-rl-step": "refused: see the page on reinforcement learning",
    "--phase-transition-iterations": "refused: put the phases in one recipe, with `Mixture.then`",
    "--decrease-batch-size-if-needed": "refused: the recipe's `Batch` says how large a step is",
    "--split": "no effect on data: `MegatronGPT(split=)` has it",
    "--seed": "no effect on data: the recipe has its own",
    "--num-workers": "no effect on data: meshfeed reads on a thread",
    "--exit-signal-handler-for-dataloader": "no effect on data: it is of a DataLoader's workers",
    "--data-cache-path": "no effect on data: `MegatronGPT(index_cache=)` has it",
    "--mid-level-dataset-surplus": "no effect on data: `MegatronGPT(mid_level_dataset_surplus=)` has it",
    "--per-dataset-sequences-path": "no effect on data: it is of Megatron's own datasets alone, as "
    "--num-dataset-builder-threads, --dataloader-fast-cache-load, --dataloader-defer-npy-index-mmap, "
    "--no-mmap-bin-files and --object-storage-cache-path",
    "--validation-set-names": "no effect on data: --multiple-validation-sets, which has them, is refused",
    "--create-attention-mask-in-dataloader": "no effect on data: models get no mask, since rows are causal",
}
"""How `DatasetsProvider` treats each argument of Megatron-LM that concerns data."""

_OF_RULE = {
    "reset_position_ids": "reset_position_ids",
    "reset_attention_mask": "reset_attention_mask",
    "eod_mask_loss": "eod_mask_loss",
    "dataloader_inter_document_masking": "reset_attention_mask",
}
"""Megatron's options for rows, and their names in a rule."""


class DatasetsProvider:
    """The provider of datasets for Megatron-LM's `pretrain`, with `--dataloader-type external`.

        with megatron.DatasetsProvider(train=recipe, valid=valid) as provider:
            pretrain(provider, model_provider, ModelType.encoder_or_decoder, forward_step)

    Training begins at the iteration of the checkpoint that Megatron has loaded, and a step of it is an
    iteration of Megatron's, also after some that it skips. Validation continues where the last one ended,
    from consumed_valid_samples on, as Megatron's own does; test begins at its first step. `forward_step` gets
    its batches by `megatron.get_batch`, on every rank and stage. Leaving `with` closes all feeds.

    Args:
        train: what to train on.
        valid: what to evaluate on; None only with --eval-iters 0.
        test: what to test on; None for no test.
        readers: who reads; see `Readers`.
        packing: of packed sequences; `microbatches=` gives each step the number that Megatron takes.
        transport: as for `megatron.feed`; each feed's name is its recipe's, such as "train".
        options: all others of `megatron.feed`, such as device and verify. ledger and metrics are of `train`.
    """

    is_distributed = True  # every rank has iterators, which `pretrain` then passes on

    def __init__(
        self,
        *,
        train: Recipe,
        valid: Recipe | None = None,
        test: Recipe | None = None,
        readers: Readers = "shared",
        packing: Packing | None = None,
        transport: Transport = Transport(),
        **options: Any,
    ) -> None:
        self._recipes = {"train": train, "valid": valid, "test": test}
        self._readers: Readers = readers
        self._packing, self._transport, self._options = packing, transport, options
        self._feeds = ExitStack()
        self._iterators: list[list[StageIterator | None]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the feeds. May be called again."""
        self._feeds.close()

    def __call__(
        self, train_val_test_num_samples: Sequence[int | None], vp_stage: int | None = None
    ) -> tuple[StageIterator | None, ...]:
        """The iterators of training, validation and test for a virtual stage; None if Megatron takes none.

        The first call waits for the other ranks. Raises RecipeError for an argument of Megatron's that does
        not fit the recipes, and StateError for a checkpoint that does not.
        """
        if self._iterators is None:
            args = framework("megatron.training.global_vars", "megatron").get_args()
            self._check(args)
            opened = [
                self._open(name, args, wanted)
                for name, wanted in zip(self._recipes, train_val_test_num_samples)
            ]
            self._iterators = [list(stages) for stages in zip(*opened)]
        return tuple(self._iterators[vp_stage or 0])

    def _check(self, args: Any) -> None:
        if args.dataloader_type != "external":
            raise RecipeError(
                f"dataloader_type={args.dataloader_type!r}: pass --dataloader-type external, or "
                f"args_defaults={{'dataloader_type': 'external'}} to pretrain"
            )
        given = {option: getattr(args, option[2:].replace("-", "_"), None) for option in CONFIG_FIELDS}
        refuse_options({option: value for option, value in given.items() if value}, CONFIG_FIELDS)
        if args.eval_iters and self._recipes["valid"] is None:
            raise RecipeError(
                f"eval_iters={args.eval_iters}, and Megatron evaluates at the end of training too, on "
                f"nothing; give valid=, or pass --eval-iters 0"
            )
        for name, recipe in self._recipes.items():
            if recipe is not None:
                _check_rule(name, recipe, args)

    def _open(self, name: str, args: Any, wanted: int | None) -> Sequence[StageIterator | None]:
        """The iterators of each virtual stage. wanted: sequences that Megatron will take; None if unknown."""
        recipe = self._recipes[name]
        unused = args.skip_train if name == "train" else not args.eval_iters
        if recipe is None or unused:
            return [None] * (args.virtual_pipeline_model_parallel_size or 1)
        rows, of_step = args.micro_batch_size, _batch_size(name, args)
        if name != "train":
            rows = getattr(args, "eval_micro_batch_size", None) or rows
        packed = recipe.sequence.packed
        # its embedding and loss take a token beyond the vocabulary for one of another tp rank
        has_tokens = "tokens" in field_names(recipe)
        checked = {"vocab_size": getattr(args, "padded_vocab_size", None)} if has_tokens else {}
        options = checked | self._options
        options |= {} if name == "train" else {"ledger": None, "metrics": None}
        made = feed(
            recipe,
            args,
            readers=self._readers,
            transport=replace(self._transport, name=name),
            **({"packing": self._packing} if packed else {"micro_batch_size": rows}),
            **options,
        )
        recipe = made.recipe  # with the amendments of a ledger
        if name == "train":
            check_left_out(recipe, skipped_of(args), range(args.iteration, args.train_iters))
        made.run(_first_step(name, recipe, args))
        self._feeds.enter_context(made)
        check_shape(name, made, args, rows)
        if name == "train":
            wanted = args.train_iters  # Megatron computes it from train_samples, too, also if batches grow
        elif wanted is not None:
            wanted //= of_step
        check_end(name, made, wanted)
        if name == "train":
            return iterators_of_stages(made, args=args)
        count = of_step // (rows * made.layout.dp)
        return unfollowed_iterators(made, lambda: count)


def _check_rule(name: str, recipe: Recipe, args: Any) -> None:
    """Refuse Megatron's options of a row that its rule does not have."""
    rule = recipe.sequence
    dealt = not (rule.packed or isinstance(recipe.shuffle, Blocks))
    if name == "train" and not dealt and (folder := getattr(args, "logits_load_dir", None)):
        raise RecipeError(
            f"logits_load_dir={folder!r}: Megatron finds a teacher's logits as its sampler deals rows to any "
            f"number of data-parallel ranks, and train has packs or a shuffle by blocks, which follow from "
            f"that number; use rows, with shuffle='global'"
        )
    length = None if rule.packed else getattr(rule, "length", None)
    if length is not None and length != args.seq_length:
        raise RecipeError(
            f"{name} has rows of {length} tokens, and seq_length is {args.seq_length}; make them equal"
        )
    for option, of_rule in _OF_RULE.items():
        if not getattr(args, option, False) or getattr(rule, of_rule, False):
            continue
        if rule.packed:
            raise RecipeError(
                f"{option} is set among Megatron's arguments, and has no effect on the packs of {name}, "
                f"{rule.summary()}: the sequences of a pack are kept apart, each with positions from 0, and "
                f"what bears loss is theirs; leave it out"
            )
        raise RecipeError(
            f"{option} is set among Megatron's arguments, and {name} has {rule.summary()}; give the rule "
            f"{of_rule}=True"
        )


def check_left_out(recipe: Recipe, told: Sequence[int], steps: range) -> None:
    """Refuse steps that amendments leave out and Megatron would train.

    told: the iterations that it skips, from 1. steps: those that it goes through, from 0.
    """
    skipped = recipe.amendments.skipped
    ranges = [range(max(first, steps.start), min(stop, steps.stop)) for first, stop in skipped]
    if missing := {step + 1 for each in ranges for step in each} - {*told}:
        first, last = min(missing), max(missing)
        raise RecipeError(
            f"the ledger leaves out {len(missing)} iterations from {first} to {last} (from 1) that Megatron "
            f"would train: it skips only what its own option names; pass --iterations-to-skip "
            f"{' '.join(map(str, sorted({*told} | missing)))} with the ledger"
        )


def check_shape(name: str, made: Feed, args: Any, rows: int) -> None:
    """Refuse packs of another shape than the activations that Megatron's pipeline sends."""
    one_shape = made.layout.pp > 1 and getattr(args, "variable_seq_lengths", None) is False
    if made.packing is None or not one_shape:
        return
    length = made.packing.capacity * made.layout.cp
    if (length, 1) != (args.seq_length, rows):
        raise RecipeError(
            f"{name} has packs of {length} tokens, and pipeline stages expect {rows} x {args.seq_length}, "
            f"the micro batch size x seq_length; make them 1 x {length}, or set variable_seq_lengths"
        )


def check_loss(made: Feed, config: Any) -> None:
    """Refuse packs that cp cuts, where Megatron takes the mean over the part of each rank."""
    if made.packing is not None and made.layout.cp > 1 and not config.calculate_per_token_loss:
        raise RecipeError(
            f"cp={made.layout.cp} cuts packs into parts in which unlike numbers of tokens bear loss, and "
            f"each part would count the same; set calculate_per_token_loss=True"
        )


def _first_step(name: str, recipe: Recipe, args: Any) -> int:
    """The step that Megatron takes first. Raises StateError if its counts are not those of the recipe."""
    if name == "test" or (name == "valid" and args.skip_train):
        return 0
    packed = recipe.sequence.packed  # then Megatron's samples are not its sequences
    if name == "train":
        step, consumed = args.iteration, args.consumed_train_samples
        if packed:
            return step
    else:
        consumed, of_step = args.consumed_valid_samples, _batch_size(name, args)
        if packed and consumed % of_step:
            raise StateError(
                f"{name}: Megatron has taken {consumed} samples, which are no whole number of iterations of "
                f"{of_step}; evaluate with the batch size that the checkpoint was made with"
            )
        if packed:
            return consumed // of_step
        step = recipe.batch.step(consumed)
    if (counted := recipe.batch.position(step)) != consumed:  # Megatron counts short steps whole
        raise StateError(
            f"{name}: Megatron has taken {consumed} samples before step {step}, where the recipe has "
            f"{counted}; make its Batch what the batch sizes were, with Batch.then where they changed"
        )
    return step


def _batch_size(name: str, args: Any) -> int:
    """The samples of an iteration, as Megatron counts them."""
    of_eval = None if name == "train" else getattr(args, "eval_global_batch_size", None)
    return of_eval or args.global_batch_size


def check_end(name: str, made: Feed, wanted: int | None) -> None:
    """Refuse a recipe that ends, or has a short last step, before Megatron does. wanted: its steps."""
    if wanted is None or made.num_steps is None:
        return
    batch, last = made.recipe.batch, wanted - 1
    short = made.num_steps == wanted and batch.tokens is None and _is_short(made, last, batch.size(last))
    if short or made.num_steps < wanted:
        raise RecipeError(
            f"{name} ends after {made.num_steps} steps{', the last of them short' if short else ''}, and "
            f"Megatron takes {wanted}; leave its epochs and steps without a limit, or train and evaluate for "
            f"fewer iterations"
        )


def _is_short(made: Feed, step: int, size: int) -> bool:
    """Whether a step of rows has fewer microbatches than one of `size` sequences."""
    count = made.num_microbatches(step)
    return count is not None and count < -(-size // (made.micro_batch_size * made.layout.dp))

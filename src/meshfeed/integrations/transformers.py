"""transformers: a Trainer whose train_dataset and eval_dataset are recipes.

A batch is a microbatch of `per_device_train_batch_size` rows, and a step has `gradient_accumulation_steps` of
them. The product of both and the data-parallel ranks must be the recipe's sequences per step. accelerate does
not shard or wrap the loaders, since each rank already gets its own data. With a Packing, a batch is a pack in
transformers' padding-free form.

    FeedTrainer(model, args, train_dataset=recipe, eval_dataset=other).train(resume_from_checkpoint=True)
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, cast

import numpy as np
import torch

from meshfeed.errors import LayoutError, MeshfeedError, RecipeError, StateError
from meshfeed.feed import Feed
from meshfeed.feed.batch import Microbatch, Step
from meshfeed.integrations.apart import KERNEL_BOUNDS, bounds, kept_apart, takes_seq_idx
from meshfeed.integrations.config import WHOLE, layout_of_accelerator
from meshfeed.integrations.loader import (
    IGNORED,
    OF_TEXT,
    EvalLoader,
    Settings,
    TrainLoader,
    changed_options,
    check_feed_options,
    end_of,
    field_names,
    for_evaluation,
    framework,
    masked_labels,
    pads_rows,
    refuse_half_apart,
    refuse_lacking,
    refuse_masked,
    refuse_options,
)
from meshfeed.integrations.model_parts import FRAMES, IN_ONE, ONE_TOKEN, check_parts, check_tiles, with_parts
from meshfeed.integrations.share_encoders import exchanges_in, share_encoders
from meshfeed.layout import Layout
from meshfeed.masked import Masked
from meshfeed.multimodal import MROPE, EncoderExchange, Multimodal, encoder_routes_of
from meshfeed.plan import Packing, StepPlan
from meshfeed.recipe import Recipe
from meshfeed.sequence import encoder_of
from meshfeed.sequence.table import RUN_FIELDS

_CAUSAL = frozenset({MROPE.name, *RUN_FIELDS, *OF_TEXT})
"""The fields that `causal_batch` uses or ignores."""
_MASKED = frozenset({"tokens", "labels", "loss_mask", "padding_mask", "position_ids"})
"""The fields that `masked_batch` uses or ignores."""
_SHIFTED = "shift_labels"
_ROUTES = "encoder_routes"  # of a batch, until the model is called
_KEY = "meshfeed"  # in the checkpoint's trainer_state.json
_IN_TRAINING = frozenset({"train_sampling_strategy", "data_seed", "ignore_data_skip", "auto_find_batch_size"})
"""Options about the training set alone; the others concern each set that is not a recipe, too."""
CONFIG_FIELDS: dict[str, str] = {
    "per_device_train_batch_size": "honoured: rows of a microbatch",
    "gradient_accumulation_steps": "honoured: microbatches of a step, which must be those of the recipe",
    "max_steps": "honoured: the steps to train; required, and at most those of the stream",
    "per_device_eval_batch_size": "honoured: rows of a microbatch of an evaluation",
    "remove_unused_columns": "honoured: of further fields, the model gets those that its forward names",
    "label_names": "honoured: what an evaluation returns: labels, or shift_labels without compute_loss_func",
    "label_smoothing_factor": "honoured: applied to shift_labels",
    "compute_loss_func": "honoured: gets labels, each at its own token",
    "compute_metrics": "honoured: gets labels, each at its own token; filling rows are left out",
    "preprocess_logits_for_metrics": "honoured: gets labels, each at its own token",
    "prediction_loss_only": "honoured: by the Trainer",
    "eval_accumulation_steps": "honoured: by the Trainer",
    "eval_do_concat_batches": "honoured: by the Trainer",
    "batch_eval_metrics": "honoured: by the Trainer",
    "include_for_metrics": "honoured: by the Trainer, without filling rows",
    "include_num_input_tokens_seen": "honoured: by the Trainer, which counts the padding of packs, too",
    "average_tokens_across_devices": "honoured: by the Trainer",
    "parallelism_config": "honoured: its mesh is the layout; cp ranks get whole sequences, sp is refused",
    "data_collator": "refused: override FeedTrainer.batch_of",
    "train_sampling_strategy": "refused: mf.Recipe(shuffle=) sets the order, mf.Packing makes packs even",
    "length_column_name": "refused: the lengths are those of the recipe's data",
    "data_seed": "refused: mf.Recipe(seed=)",
    "ignore_data_skip": "refused: a resumed run continues its data, and nothing is read to be skipped",
    "auto_find_batch_size": "refused: the recipe's step has a fixed number of microbatches",
    "dataloader_drop_last": "refused: mf.Batch(last=)",
    "dataloader_num_workers": "refused: a feed reads ahead by itself; feed_options={'prefetch': steps}",
    "dataloader_prefetch_factor": "refused: feed_options={'prefetch': steps}",
    "dataloader_persistent_workers": "refused: a feed has no such workers",
    "dataloader_multiprocessing_context": "refused: a feed has no such workers",
    "dataloader_in_order": "refused: a recipe has one order",
    "dataloader_pin_memory": "refused: a feed pins what it copies to a GPU",
    "eval_use_gather_object": "refused: evaluations of a recipe gather tensors",
    "accelerator_config.split_batches": "refused: per_device_train_batch_size is of each rank",
    "accelerator_config.dispatch_batches": "refused: if True; feed_options={'delivery': 'broadcast'}",
    "accelerator_config.even_batches": "refused: an evaluation fills batches and counts each sequence once",
    "accelerator_config.use_seedable_sampler": "refused: mf.Recipe(seed=)",
    "accelerator_config.non_blocking": "refused: a feed copies to a GPU asynchronously",
    "num_train_epochs": "no effect on data: max_steps overrides it, as in the Trainer",
    "seed": "no effect on data: it seeds the model; mf.Recipe(seed=) seeds the order",
    "processing_class": "honoured: mean and std of its processors of images and video must be the recipe's",
}
"""How each option of TrainingArguments, AcceleratorConfig and Trainer that concerns data is treated."""
_SETTINGS = Settings(
    accumulated="gradient_accumulation_steps",
    micro_batch_size="per_device_train_batch_size",
    epoch="by max_steps",
)


def causal_batch(microbatch: Microbatch, model: torch.nn.Module | None = None) -> dict[str, Any]:
    """The inputs of transformers' causal models.

    input_ids, position_ids: int64 [rows, tokens]. shift_labels, the same: the token that each position
    predicts, -100 where there is no loss. labels: as transformers' users pass them, each at its own token, so
    one place to the right, for code that shifts them itself; they lack the last prediction of a row.
    For a pack, [1, tokens], and for rows whose documents are kept apart: position_ids restart at every
    sequence or document. cu_seq_lens_q, cu_seq_lens_k (int32), max_length_q and max_length_k are for flash
    attention. With mrope_position_ids, position_ids are [4, 1, tokens]: these, then time, height and width.

    Not every model keeps documents apart by these. model: one of transformers, also within FSDP or DDP, which
    shows that it does, at the first call: a pack of two short documents goes through it twice, without
    gradients, in eval mode; modes, buffers and random states are kept. So all ranks make this call together.
    A model whose eager, sdpa or flex attention looks at positions too little, such as GPT-OSS, gets an
    attention_mask. One whose forward takes seq_idx (int32 [rows, tokens]) gets it: it counts documents,
    padding too, for layers with a state or a convolution. Raises RecipeError for one that still reads across
    documents. Your own model or subclass, or one that needs more than these inputs, is left as it is.
    """
    made = _causal_batch(microbatch, counted=model is not None and takes_seq_idx(model))
    return made if model is None else made | kept_apart(model, made)


def _causal_batch(microbatch: Microbatch, *, counted: bool) -> dict[str, Any]:
    """`causal_batch` without a mask; counted: with seq_idx."""
    shifted = masked_labels(microbatch)
    labels = shifted.roll(1, dims=-1)
    labels[..., 0] = IGNORED  # no position predicts the first token of a row
    made: dict[str, Any] = {"input_ids": microbatch["tokens"], "labels": labels, "shift_labels": shifted}
    if "position_ids" in microbatch:
        made["position_ids"] = microbatch["position_ids"]
    starts: torch.Tensor | None = microbatch.get("cu_seqlens_padded", microbatch.get("cu_seqlens"))
    if starts is not None:
        made |= bounds(starts, labels.shape, int(microbatch["max_seqlen"]), counted=counted)
    if MROPE.name in microbatch:
        axes = microbatch[MROPE.name].movedim(-1, 0)
        made["position_ids"] = torch.cat([made["position_ids"][None], axes])
    return made


def masked_batch(microbatch: Microbatch) -> dict[str, Any]:
    """The inputs of transformers' masked models, from rows of `Masked`.

    input_ids, labels, attention_mask: int64 [rows, tokens]; labels are -100 except for hidden tokens, and the
    mask is 0 for padding. The models count positions themselves, some from another number than 0.
    """
    return {
        "input_ids": microbatch["tokens"],
        "labels": masked_labels(microbatch),
        "attention_mask": (~microbatch["padding_mask"]).long(),
    }


def takes_shift_labels(model: torch.nn.Module) -> bool:
    """Whether a model's forward takes `shift_labels`, or calls a loss function of transformers that does."""
    return any(_names_shift_labels(module) for module in model.modules())


def _names_shift_labels(module: torch.nn.Module) -> bool:
    forward = inspect.unwrap(module.forward)
    code = getattr(getattr(forward, "__func__", forward), "__code__", None)
    if code is None:
        return False
    # in co_consts if it is taken from **kwargs; a local variable of this name is neither
    if _SHIFTED in (*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], *code.co_consts):
        return True
    loss = getattr(module, "loss_function", None) if "loss_function" in code.co_names else None
    return loss is not None and _SHIFTED in inspect.signature(loss).parameters


_Base: Any = framework("transformers", "transformers").Trainer
_Callback: Any = framework("transformers", "transformers").TrainerCallback


class FeedTrainer(_Base):
    """A `transformers.Trainer` that takes recipes; the Trainer handles other datasets.

    For another trainer's loop, list that trainer second: `class MyTrainer(FeedTrainer, Seq2SeqTrainer)`.

    layout: of all ranks; None takes accelerate's device mesh, or plain data parallelism.
    feed_options: other arguments of `Feed`: packing, delivery, verify, ... The packing is for the sets whose
        rule needs one; other sets are rows. A training step is packed into gradient_accumulation_steps
        microbatches; a step that needs more is refused.
    batch_of: the model's inputs from a microbatch: those of `causal_batch`, or for rows of `Masked` those of
        `masked_batch`, and further fields of the recipe, such as pixel_values, that the model's forward
        names. A recipe without a field named tokens gives its fields alone, by the model's own names. A field
        without rows is left out: these models take no pixel_values of no image. Override it for models with
        other inputs.

    With feed_options={"encoder": "balanced"}, ranks share the encoder's work: see `share_encoders`. Your own
    batch_of must then keep what super().batch_of gives, which says what they exchange.

    compute_loss_func and metrics get `labels`, each at its own token; label_smoothing_factor uses the exact
    `shift_labels`. CONFIG_FIELDS says how each option is treated; one without effect is refused.

    The stream is one epoch of the Trainer, at most `max_steps` long. The state is saved in the checkpoint's
    trainer_state.json; resuming reads and skips no data. Evaluation counts sequences, not the rows that
    only fill up the last batch. With several data-parallel ranks, rows of `Samples` must fill it.
    """

    def __init__(
        self,
        *args: Any,
        layout: Layout | None = None,
        feed_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._layout, self._feed_options = layout, dict(feed_options or {})
        self._train_loader: TrainLoader | None = None
        self._skips_none: _SkipsNone | None = None
        self._evaluating = False  # on a recipe
        self._exchanges: list[EncoderExchange] = []
        check_feed_options("feed_options", self._feed_options)
        super().__init__(*args, **kwargs)
        _check_dataset("train_dataset", self.train_dataset)
        for name, chosen in self._evaluation_sets().items():
            _check_dataset(f"eval_dataset {name}".rstrip(), chosen)
            if isinstance(chosen, Recipe):
                self._check_returned(chosen)
        bound = inspect.signature(super().__init__).bind_partial(*args, **kwargs).arguments
        self._collator = kwargs.get("data_collator", bound.get("data_collator"))
        sets = (self.train_dataset, *self._evaluation_sets().values())
        if recipes := [given for given in sets if isinstance(given, Recipe)]:
            self._check_options()
            self._check_packing(recipes)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        before = cls.__mro__[1 : cls.__mro__.index(FeedTrainer)]
        if wrong := [
            base for base in before if issubclass(base, _Base) and not issubclass(base, FeedTrainer)
        ]:
            raise MeshfeedError(
                f"in {cls.__name__}, {wrong[0].__name__} comes before FeedTrainer and hides its loaders; "
                f"list FeedTrainer first"
            )

    @property
    def step(self) -> Step | None:
        """The step in training, with its index, valid_tokens and stats; None before the first."""
        return self._train_loader.step if self._train_loader is not None else None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; closes files and connections at the end."""
        try:
            return super().train(*args, **kwargs)
        finally:
            if self._train_loader is not None:
                self._train_loader.close()
            if self._skips_none is not None:
                self._skips_none.end()
                self.remove_callback(self._skips_none)
                self._skips_none = None

    def batch_of(self, microbatch: Microbatch) -> Any:
        """The model's inputs from a microbatch; see the class."""
        made, used = dict[str, Any](), frozenset[str]()
        rows_padded = "padding_mask" in microbatch and "cu_seqlens" not in microbatch
        if "tokens" in microbatch and rows_padded and not self._predicts_next:
            made, used = masked_batch(microbatch), _MASKED
        elif "tokens" in microbatch:
            made, used = _causal_batch(microbatch, counted=takes_seq_idx(self.model)), _CAUSAL
            packing = self._feed_options.get("packing")
            if "padding_mask" in microbatch and getattr(packing, "max_sequences", None) == 1:
                # a document alone: layers that read across documents do right without these, or refuse them
                made = {name: value for name, value in made.items() if name not in KERNEL_BOUNDS}
            if self.compute_loss_func is not None:
                # it sees labels alone, and the Trainer counts shift_labels if there are any
                del made[_SHIFTED]
        routes = encoder_routes_of(microbatch)
        further = {
            name: value
            for name, value in microbatch.items()
            if name not in used and name not in routes
            if routes or not isinstance(value, torch.Tensor) or value.ndim == 0 or len(value)
        }
        further = with_parts(self.model, self._family, made, further, microbatch)
        if self.args.remove_unused_columns:  # as the Trainer does with a dataset's columns
            self._set_signature_columns_if_needed()
            further = {name: value for name, value in further.items() if name in self._signature_columns}
        return made | further | ({_ROUTES: routes} if routes else {})

    def get_train_dataloader(self) -> Any:
        """The training stream, from the checkpoint on."""
        if not isinstance(self.train_dataset, Recipe):
            return super().get_train_dataloader()
        args = self.args
        feed = self._feed(self.train_dataset, args.train_batch_size, args.gradient_accumulation_steps)
        end, told = end_of(feed)
        if end is not None and end < args.max_steps:
            raise RecipeError(
                f"max_steps={args.max_steps}, but {told}; lower max_steps, or give the recipe more epochs"
            )
        self._train_loader = _Resumed(self, feed)
        return self._train_loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """An evaluation set, from its start."""
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        chosen = self.eval_dataset[chosen] if isinstance(chosen, str) else chosen
        if not isinstance(chosen, Recipe):
            return super().get_eval_dataloader(eval_dataset)
        return self._evaluated(chosen)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """A test set, from its start."""
        if not isinstance(test_dataset, Recipe):
            return super().get_test_dataloader(test_dataset)
        return self._evaluated(test_dataset)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's, over the rows that hold a sequence."""
        plain, self._evaluating = self.gather_function, isinstance(dataloader, _Evaluated)
        if isinstance(dataloader, _Evaluated):
            self.gather_function = dataloader.gathered
        try:
            return super().evaluation_loop(dataloader, *args, **kwargs)
        finally:
            self.gather_function, self._evaluating = plain, False

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; label smoothing uses the shifted labels, for any model."""
        plain, labels = self.label_smoother, inputs.get(_SHIFTED)
        if plain is None or self.compute_loss_func is not None or labels is None:
            return super().compute_loss(model, inputs, *args, **kwargs)

        def smoothed(outputs: Any, _: Any, shift_labels: bool = False, **more: Any) -> Any:
            return plain(outputs, labels, **more)

        self.label_smoother = smoothed
        try:
            return super().compute_loss(model, inputs, *args, **kwargs)
        finally:
            self.label_smoother = plain

    def _prepare_inputs(self, inputs: Any) -> Any:
        """As the Trainer's; what the encoders exchange is told to the model's EncoderExchange."""
        inputs = super()._prepare_inputs(inputs)
        self._expect(inputs.pop(_ROUTES, {}) if isinstance(inputs, MutableMapping) else {})
        return inputs

    def _expect(self, routes: Mapping[str, Any]) -> None:
        for exchange in self._exchanges:
            exchange.expect(routes)

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; a callback may call the model afterwards, without an exchange.

        Raises RecipeError for packs that the model does not keep apart; see `causal_batch`.
        """
        try:
            return super().training_step(model, _apart(model, inputs), *args, **kwargs)
        finally:
            self._expect({})

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; averages losses that count the tokens of all ranks over all ranks."""
        try:
            loss, *rest = super().prediction_step(model, _apart(model, inputs), *args, **kwargs)
        finally:
            self._expect({})
        of_all = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        if self._evaluating and loss is not None and of_all and self.args.average_tokens_across_devices:
            loss = self.accelerator.gather(loss).mean()
        return loss, *rest

    def _load_callback_state(self) -> None:
        """As the Trainer's, which then counts the batches to drop: none, since a recipe has a state."""
        super()._load_callback_state()
        if isinstance(self.train_dataset, Recipe):
            self._skips_none = _SkipsNone(self.args)
            self.callback_handler.callbacks.insert(0, self._skips_none)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if self._train_loader is not None:
            self.state.stateful_callbacks[_KEY] = self._train_loader.state_dict()
        super()._save_checkpoint(*args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        self._missing = set[str]()
        super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)
        self._load_missing(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        self._missing = set[str]()
        super()._load_best_model()
        self._load_missing(self.state.best_model_checkpoint)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Instead of a warning: missing weights are loaded, or refused."""
        self._missing = set(load_result.missing_keys)
        if not self._missing:
            super()._issue_warnings_after_load(load_result)

    def _load_missing(self, checkpoint: str | None) -> None:
        """Load weights that save_pretrained renames, as it does those of Qwen2-VL's vision.

        Raises StateError for weights that the checkpoint lacks.
        """
        if missing := _untied(self.model, self._missing):
            load: Any = getattr(type(self.model), "from_pretrained", None)
            if load is not None:
                loaded, told = load(checkpoint, output_loading_info=True)
                self.model.load_state_dict(loaded.state_dict())
                missing = _untied(self.model, set(told["missing_keys"]))
            if missing:
                raise StateError(
                    f"{checkpoint} lacks {len(missing)} weights of {type(self.model).__name__}, such as "
                    f"{min(missing)}; resume with the model that was saved"
                )

    def _evaluated(self, recipe: Recipe) -> EvalLoader:
        if self.train_dataset is None:
            self._check_options()
        self._check_returned(recipe)
        return _Evaluated(self, self._feed(recipe, self.args.eval_batch_size, evaluates=True))

    @property
    def _family(self) -> str | None:
        return getattr(getattr(self.model, "config", None), "model_type", None)

    @cached_property
    def _predicts_next(self) -> bool:
        return takes_shift_labels(self.model)

    def _evaluation_sets(self) -> Mapping[str, Any]:
        given: Any = self.eval_dataset
        return given if isinstance(given, Mapping) else {"": given}

    def _check_returned(self, recipe: Recipe) -> None:
        """Raises RecipeError for an evaluation that would return labels that its loss must not count."""
        makes = type(self).batch_of is FeedTrainer.batch_of and "tokens" in field_names(recipe)
        if makes and self.compute_loss_func is not None and _SHIFTED in self.label_names:
            raise RecipeError(
                f"label_names={self.label_names} with compute_loss_func: a loss function gets labels, each "
                f"at its own token, and no shift_labels; leave out label_names or compute_loss_func"
            )

    def _check_packing(self, recipes: Sequence[Recipe]) -> None:
        """Raises RecipeError now for sets that a feed would refuse in the midst of training."""
        given = self._feed_options.get("packing") is not None
        packed = [recipe for recipe in recipes if recipe.sequence.packed]
        if given and not packed:
            raise RecipeError(
                "feed_options has a packing, but all sets have sequences of one length; leave it out"
            )
        if packed and not given:
            rule = type(packed[0].sequence).__name__
            raise RecipeError(
                f"{rule}() is packed; give feed_options={{'packing': mf.Packing(capacity=...)}}"
            )
        if packed and (num := self.args.n_gpu) > 1:
            raise LayoutError(
                f"{num} GPUs in one process: DataParallel gives a pack to one of them, and the Trainer then "
                f"multiplies its loss by {num}; start a process for each GPU, as torchrun does"
            )

    def _check_options(self) -> None:
        """Raises RecipeError for options that would have no effect on any set that this trainer has.

        LayoutError for sequence parallelism, whose ranks exchange batches and cut each into several.
        """
        args = self.args
        _ = layout_of_accelerator(self.accelerator)
        changed = changed_options(args) | changed_options(args.accelerator_config, "accelerator_config.")
        changed |= {} if self._collator is None else {"data_collator": self._collator}
        if args.use_cpu:  # the arguments change it themselves
            changed.pop("dataloader_pin_memory", None)
        if args.accelerator_config.dispatch_batches is False:
            del changed["accelerator_config.dispatch_batches"]
        given = [self.train_dataset, *self._evaluation_sets().values()]
        others = any(not isinstance(each, Recipe | None) for each in given)
        trains = isinstance(self.train_dataset, Recipe)
        concerned = [name for name in changed if (trains if name in _IN_TRAINING else not others)]
        refuse_options({name: changed[name] for name in concerned}, CONFIG_FIELDS)

    def _feed(
        self,
        recipe: Recipe,
        micro_batch_size: int,
        num_microbatches: int | None = None,
        *,
        evaluates: bool = False,
    ) -> Feed:
        _check_positions(recipe, self.model)
        if type(self).batch_of is FeedTrainer.batch_of:
            _check_labels(recipe, self.model, self._predicts_next)
            refuse_half_apart(recipe, "transformers keeps")
            encoder = self._feed_options.get("encoder", "with sample")
            check_tiles(recipe, encoder)
            self._check_parts(recipe)
            if encoder != "with sample" and FRAMES in field_names(recipe) and self._family in IN_ONE:
                raise RecipeError(
                    f"encoder={encoder!r}: {self._family} takes frames of videos as images, and outputs are "
                    f"exchanged by kind; choose encoder='with sample'"
                )
        layout = self._layout or layout_of_accelerator(self.accelerator)
        given = for_evaluation(self._feed_options, recipe) if evaluates else self._feed_options
        options: dict[str, Any] = {"device": self.args.device, **given}
        if not recipe.sequence.packed:
            options.pop("packing", None)
        if isinstance(packing := options.get("packing"), Packing):
            check_packing(packing, getattr(self.accelerator, "torch_device_mesh", None))
            options["packing"] = replace(packing, microbatches=packing.microbatches or num_microbatches)
        else:
            # an evaluation counts the rows that hold a sequence
            pads = evaluates and pads_rows(recipe, layout.dp)
            options = {"micro_batch_size": micro_batch_size, "pad_rows": pads, **options}
        feed = Feed(recipe, layout, self.args.process_index, **options)
        if encoder_of(feed.recipe.sequence) != "with sample":
            self._share_encoders(feed)
        return feed

    def _check_parts(self, recipe: Recipe) -> None:
        """Raises RecipeError for parts that `batch_of` would lose, or that the model cannot tell apart."""
        rule, family = recipe.sequence, self._family
        if not isinstance(rule, Multimodal):
            return
        self._set_signature_columns_if_needed()
        taken = {*self._signature_columns, *([FRAMES] if family in IN_ONE else [])}
        inner: Any = getattr(self.model, "get_base_model", lambda: self.model)()  # of PEFT
        is_theirs = type(inner).__module__.startswith("transformers.")
        if is_theirs:
            check_parts(inner.config, rule, self.processing_class)
        drops = self.args.remove_unused_columns or is_theirs
        for kind, processor in rule.processors.items():
            made = [field.name for field in processor.fields]
            if drops and taken.isdisjoint(made):
                raise RecipeError(
                    f"{type(self.model).__name__} takes no {' or '.join(made)}, so that it would train on "
                    f"the placeholders of parts it never sees; leave {kind} out of Multimodal, or give a "
                    f"processor whose fields its forward names, or override FeedTrainer.batch_of"
                )
        alone = getattr(self._feed_options.get("packing"), "max_sequences", None) == 1
        if family in ONE_TOKEN and rule.image and rule.video and not alone:
            raise RecipeError(
                f"{family} has one token for images and video, so that a pack may not have both; leave image "
                f"or video out of Multimodal, or pack single documents, each of one kind, by "
                f"Packing(max_sequences=1)"
            )

    def _share_encoders(self, feed: Feed) -> None:
        """Have the model exchange encoder outputs, in a group of its own."""
        if not exchanges_in(self.model):
            share_encoders(self.model)
        self._exchanges, ranks = exchanges_in(self.model), list(feed.encoder_ranks)
        for exchange in self._exchanges:
            if exchange.group is None and len(ranks) > 1:
                made: Any = torch.distributed.new_group(ranks, use_local_synchronization=True)
                exchange.group = made


def _untied(model: torch.nn.Module, missing: set[str]) -> set[str]:
    """The missing weights of a model that are not tied to a weight that is there."""
    weights = model.state_dict(keep_vars=True)
    present = {id(weights[name]) for name in weights.keys() - missing}
    return {name for name in missing & weights.keys() if id(weights[name]) not in present}


def _check_dataset(name: str, given: object) -> None:
    # the Trainer handles other datasets, also a list of rows
    if isinstance(given, list | tuple) and given and not isinstance(given[0], Mapping):
        held = type(cast(Any, given[0])).__name__
        raise RecipeError(
            f"{name} is a {type(given).__name__} of {held}; give a mf.Recipe: data=mf.Mixture(...) for "
            f"several sources, data=mf.Mapped(...) for your own items; the Trainer handles a torch Dataset"
        )


def _check_labels(recipe: Recipe, model: torch.nn.Module, predicts_next: bool) -> None:
    """Raises RecipeError for labels in other places than the model's loss expects."""
    name, has_tokens = type(model).__name__, "tokens" in field_names(recipe)
    if has_tokens:
        refuse_lacking(recipe, {"labels"}, name)
    if predicts_next:
        refuse_masked(recipe, name)
    elif has_tokens and not isinstance(recipe.sequence, Masked):
        raise RecipeError(
            f"{name} takes no shift_labels, so that nothing says whether its loss shifts labels; give its "
            f"forward that argument, the token that each position predicts, or override FeedTrainer.batch_of"
        )


def _check_positions(recipe: Recipe, model: torch.nn.Module) -> None:
    """Raises RecipeError for packs without the positions that the model computes for rows."""
    rule = recipe.sequence
    if not isinstance(rule, Multimodal) or rule.positions == "mrope":
        return
    if (rule.image or rule.video) and any(hasattr(module, "get_rope_index") for module in model.modules()):
        raise RecipeError(
            f"{type(model).__name__} has a multimodal rope, whose positions it cannot compute for packs; "
            f"make them by Multimodal(..., positions='mrope')"
        )


def _checked_batch(trainer: FeedTrainer, microbatch: Microbatch) -> Any:
    """The trainer's `batch_of`. Raises RecipeError if it loses what the encoders exchange."""
    made = trainer.batch_of(microbatch)
    if encoder_routes_of(microbatch) and not (isinstance(made, MutableMapping) and _ROUTES in made):
        raise RecipeError(
            f"{type(trainer).__name__}.batch_of: without its {_ROUTES}, ranks that share the encoder's work "
            f"would use features of other parts; keep what super().batch_of gives, in a dict"
        )
    return cast(Any, made)


def _apart(model: torch.nn.Module, inputs: Any) -> Any:
    if not isinstance(inputs, MutableMapping) or not (given := kept_apart(model, cast(Any, inputs))):
        return inputs
    return {**inputs, **given}


def check_packing(packing: Packing, mesh: Any) -> None:
    """Raises RecipeError or LayoutError if sequences would be split among ranks."""
    if packing.policy == "dynamic_cp":
        raise RecipeError(
            "Packing(policy='dynamic_cp') splits sequences among ranks, and transformers' attention does not "
            "join them; choose policy='balanced' or 'in_order'"
        )
    names = getattr(mesh, "mesh_dim_names", None) or ()
    if cutting := [name for name in names if name in WHOLE and mesh[name].size() > 1]:
        raise LayoutError(
            f"accelerate splits batches along {cutting} regardless of where the sequences of a pack begin; "
            f"train packs without {cutting}, or sequences of one length"
        )


class _Evaluated(EvalLoader):
    """An evaluation set as the Trainer counts it.

    dataset: has the number of sequences as its length. end_of_dataloader, remainder: read by accelerate while
    it iterates.
    """

    def __init__(self, trainer: FeedTrainer, feed: Feed) -> None:
        super().__init__(feed, partial(_checked_batch, trainer))
        if feed.num_sequences is None:
            raise RecipeError(
                "evaluation on an endless stream never ends; give its recipe epochs=1 or steps=..."
            )
        self.dataset, self.end_of_dataloader, self.remainder = range(feed.num_sequences), False, -1
        self._accelerator = trainer.accelerator
        self._held: list[tuple[int, int]] = []

    def __iter__(self) -> Iterator[Any]:
        state, last = self._accelerator.gradient_state, (self._feed.num_steps or 0) - 1
        self.end_of_dataloader = False
        state._add_dataloader(self)
        try:
            for step, microbatch in self._microbatches():
                self._held = held(self._feed, step.plan, microbatch.index)
                self.end_of_dataloader = (step.index, microbatch.index + 1) == (last, step.num_microbatches)
                yield self._batch_of(microbatch)
        finally:
            state._remove_dataloader(self)

    def gathered(self, data: Any) -> Any:
        """Gather the last microbatch of all ranks: the rows with a sequence, each once."""
        apply = framework("accelerate.utils", "transformers").recursively_apply
        return apply(self._kept, self._accelerator.gather(data))

    def _kept(self, rows: torch.Tensor) -> torch.Tensor:
        each = len(rows) // self._accelerator.num_processes
        return torch.cat([rows[rank * each :][: min(num, each)] for rank, num in self._held])


def held(feed: Feed, plan: StepPlan, microbatch: int) -> list[tuple[int, int]]:
    """(rank, rows of its microbatch that hold a sequence), for one rank of each dp and cp coordinate."""
    layout = feed.layout
    first_ranks = plan.first_rank[plan.microbatch == microbatch]
    num_rows = np.bincount(first_ranks // layout.cp, minlength=layout.dp)
    if feed.packing is not None:
        num_rows = np.minimum(num_rows, 1)  # a pack is a row
    places = [(layout.coord(rank), rank) for rank in layout.ranks().tolist()]
    alone = sorted((at.dp, at.cp, rank) for at, rank in places if at.tp == at.pp == 0)
    return [(rank, int(num_rows[dp])) for dp, _, rank in alone]


class _SkipsNone(_Callback):
    """Sets ignore_data_skip until training begins, since the user may give these to other trainers."""

    def __init__(self, args: Any) -> None:
        self._args, self._before = args, args.ignore_data_skip
        args.ignore_data_skip = True

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.end()

    def end(self) -> None:
        self._args.ignore_data_skip = self._before


class _Resumed(TrainLoader):
    """Loads the Trainer's saved state when it is first iterated, since it is not known before."""

    def __init__(self, trainer: FeedTrainer, feed: Feed) -> None:
        args = trainer.args
        super().__init__(
            feed,
            partial(_checked_batch, trainer),
            accumulated=lambda: args.gradient_accumulation_steps,
            trained=lambda: trainer.state.global_step * args.gradient_accumulation_steps,
            settings=_SETTINGS,
        )
        self._trainer = trainer
        self._begun = False

    def __iter__(self) -> Any:
        state = self._trainer.state
        if not self._begun and state.global_step:
            saved = state.stateful_callbacks.get(_KEY)
            if saved is None:
                raise StateError(
                    f"the checkpoint of step {state.global_step} was saved without meshfeed and lacks the "
                    f"data position; resume with the data it was trained on, or start a new run from its "
                    f"model"
                )
            self.load_state_dict(saved)
        self._begun = True
        # a callback may have ended the Trainer's epoch within a step, which begins again
        self._trainer.model.zero_grad()
        if state.global_step < state.max_steps:  # a finished run would train one more step before it notices
            yield from super().__iter__()

    def __len__(self) -> int:
        raise TypeError("a stream has no len() for the Trainer; give max_steps")

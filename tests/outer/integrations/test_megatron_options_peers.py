"""The table of Megatron-LM's arguments has all that concern data, of its own parser, from a checkout."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from meshfeed.integrations.megatron.pretrain import CONFIG_FIELDS
from services.needs import checkout

DATA = re.compile(
    r"data|sample|batch|seq|eval|valid|train-iter|fim|mask|eod|reset|skip|pad-token|logits-load-dir"
)
OTHERS = {
    "inference and reinforcement learning": r"inference-.*|rl-.*|skip-prompt-log-probs",
    "how parameters are sharded, and checkpoints": r"data-parallel-.*|no-data-sharding|ckpt-.*|metadata-path",
    "models": r"no-masked-softmax-fusion|rotary-seq-len-.*|window-attn-skip-freq|null-tokenizer-eod-id",
    "learning rates, logs and memory": r"lr-.*-samples|log-validation-.*|manual-gc-eval",
    "--fim-data, which is refused": r"fim-.*",
    "other models' data, of encoders, retrieval and images": r"mask-(factor|prob|type)|short-seq-prob|"
    r"decoder-seq-length|data-per-class-fraction|(block|evidence|titles)-data-path|indexer-batch-size",
    "--create-attention-mask-in-dataloader": r"no-create-attention-mask-in-dataloader",
    "nothing: no code of its pretraining reads them": r"batch-size|sample-rate",
}
"""Options of such names that concern no data of pretraining: what they are about."""


def options_of(folder: Path) -> Iterator[str]:
    """The options that its parser is given by name, and the fields of dataclasses that it makes options of."""
    training = folder / "megatron" / "training"
    for path in (training / "arguments.py", *sorted((training / "config").glob("*_config.py"))):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                named = (str(arg.value) for arg in node.args if isinstance(arg, ast.Constant))
                yield from (name for name in named if name.startswith("--"))
            elif isinstance(node, ast.ClassDef):
                fields = (each.target for each in node.body if isinstance(each, ast.AnnAssign))
                yield from (
                    f"--{field.id.replace('_', '-')}" for field in fields if isinstance(field, ast.Name)
                )


def test_the_table_has_every_option_that_concerns_data() -> None:
    options = {*options_of(checkout("Megatron-LM"))}
    table = {*re.findall(r"--[a-z-]+[a-z]", " ".join([*CONFIG_FIELDS, *CONFIG_FIELDS.values()]))}
    assert {"--train-iters", "--eval-interval", "--seq-length", "--fim-data"} <= options
    others = re.compile(rf"--({'|'.join(OTHERS.values())})")
    missing = {each for each in options - table if DATA.search(each) and not others.fullmatch(each)}
    assert missing == set()

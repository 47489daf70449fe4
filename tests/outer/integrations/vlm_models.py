"""What ranks import that train tiny models of Qwen's vision family; see `world.preload`."""

import av  # noqa: F401
import PIL.Image  # noqa: F401
import transformers.models.qwen2_vl.modeling_qwen2_vl
import transformers.models.qwen3_vl.modeling_qwen3_vl  # noqa: F401

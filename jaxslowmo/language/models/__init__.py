"""Models of the command line and the examples; they need flax, from the extra `train`."""

from ._gpt import GPT as GPT
from ._gpt import GPT_PRESETS as GPT_PRESETS
from ._gpt import GPTConfig as GPTConfig
from ._gpt import gpt_logits_fn as gpt_logits_fn
from ._gpt import gpt_loss_fn as gpt_loss_fn
from ._gpt import gpt_param_specs as gpt_param_specs
from ._gpt import gpt_preset as gpt_preset
from ._gpt import gpt_types as gpt_types
from ._gpt import init_gpt as init_gpt
from ._gpt import num_parameters as num_parameters
from ._layers import GPTLayers as GPTLayers
from ._layers import gpt_layers as gpt_layers
from ._sharding import GPT_RULES as GPT_RULES
from ._sharding import gpt_rules as gpt_rules

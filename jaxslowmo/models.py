"""The models of the command line, for `import jaxslowmo.models`. They need the extra `train`."""

from .language._gpt import GPT as GPT
from .language._gpt import GPT_PRESETS as GPT_PRESETS
from .language._gpt import GPTConfig as GPTConfig
from .language._gpt import gpt_logits_fn as gpt_logits_fn
from .language._gpt import gpt_loss_fn as gpt_loss_fn
from .language._gpt import gpt_param_specs as gpt_param_specs
from .language._gpt import gpt_preset as gpt_preset
from .language._gpt import gpt_types as gpt_types
from .language._gpt import init_gpt as init_gpt
from .language._gpt import num_parameters as num_parameters
from .language._gpt import GPTLayers as GPTLayers
from .language._gpt import gpt_layers as gpt_layers
from .language._gpt import GPT_RULES as GPT_RULES
from .language._gpt import gpt_rules as gpt_rules

"""The models of the command line, for `import jaxslowmo.models`. They need the extra `train`."""

from .language.models import GPT as GPT
from .language.models import GPT_PRESETS as GPT_PRESETS
from .language.models import GPT_RULES as GPT_RULES
from .language.models import GPTConfig as GPTConfig
from .language.models import GPTLayers as GPTLayers
from .language.models import gpt_layers as gpt_layers
from .language.models import gpt_logits_fn as gpt_logits_fn
from .language.models import gpt_loss_fn as gpt_loss_fn
from .language.models import gpt_param_specs as gpt_param_specs
from .language.models import gpt_preset as gpt_preset
from .language.models import gpt_rules as gpt_rules
from .language.models import gpt_types as gpt_types
from .language.models import init_gpt as init_gpt
from .language.models import num_parameters as num_parameters

"""What a program sends, read off its text: StableHLO before, HLO after compilation."""

from ._collectives import COLLECTIVES as COLLECTIVES
from ._collectives import Block as Block
from ._collectives import Collective as Collective
from ._collectives import Loop as Loop
from ._collectives import Program as Program
from ._collectives import leaves as leaves
from ._collectives import phase_of as phase_of
from ._collectives import wire_bytes as wire_bytes
from ._find_mesh import MeshAxes as MeshAxes
from ._find_mesh import mesh_axes as mesh_axes
from ._find_mesh import meshes_of_arguments as meshes_of_arguments
from ._find_mesh import meshes_of_compiled as meshes_of_compiled
from ._find_mesh import meshes_of_jaxpr as meshes_of_jaxpr
from ._groups import UNKNOWN_AXIS as UNKNOWN_AXIS
from ._groups import axis_of as axis_of
from ._hlo import read_hlo as read_hlo
from ._hlo_text import Instruction as Instruction
from ._hlo_text import parse_module as parse_module
from ._stablehlo import has_devices as has_devices
from ._stablehlo import meshes_of_module as meshes_of_module
from ._stablehlo import read_stablehlo as read_stablehlo

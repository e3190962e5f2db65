"""Pure functions from arrays to plotly figures, in one house style. The app, notebooks and the command line share them.

Scores use cividis over a stated range, signed effects red-blue centred on 0; cells without a value are grey, which
neither scale contains. Queries run down, keys across. A figure has no title until it is ``captioned``.
"""

from workbench.analyses.figures.agreement import agreement_dots as agreement_dots
from workbench.analyses.figures.agreement import deletion as deletion
from workbench.analyses.figures.agreement import diagonal as diagonal
from workbench.analyses.figures.agreement import quadrants as quadrants
from workbench.analyses.figures.agreement import source_map as source_map
from workbench.analyses.figures.browser import ExportError as ExportError
from workbench.analyses.figures.browser import find_browser as find_browser
from workbench.analyses.figures.captions import captioned as captioned
from workbench.analyses.figures.captions import indexed as indexed
from workbench.analyses.figures.circuit import circuit_view as circuit_view
from workbench.analyses.figures.comparison import head_map_pair as head_map_pair
from workbench.analyses.figures.comparison import pattern_pair as pattern_pair
from workbench.analyses.figures.export import FORMATS as FORMATS
from workbench.analyses.figures.export import PICTURES as PICTURES
from workbench.analyses.figures.export import config as config
from workbench.analyses.figures.export import figure_file as figure_file
from workbench.analyses.figures.export import picture_for_page as picture_for_page
from workbench.analyses.figures.export import write_figure as write_figure
from workbench.analyses.figures.export import write_figures as write_figures
from workbench.analyses.figures.generation import step_curves as step_curves
from workbench.analyses.figures.generation import step_map as step_map
from workbench.analyses.figures.gradients import layer_position_map as layer_position_map
from workbench.analyses.figures.gradients import token_bars as token_bars
from workbench.analyses.figures.gradients import token_map as token_map
from workbench.analyses.figures.heads import effects as effects
from workbench.analyses.figures.heads import framed as framed
from workbench.analyses.figures.heads import head_map as head_map
from workbench.analyses.figures.heads import head_scatter as head_scatter
from workbench.analyses.figures.induction import pair_map as pair_map
from workbench.analyses.figures.lens import lens_map as lens_map
from workbench.analyses.figures.lens import paired_bars as paired_bars
from workbench.analyses.figures.mosaic import layer_mosaic as layer_mosaic
from workbench.analyses.figures.numbers import numbers_of as numbers_of
from workbench.analyses.figures.paper import PRESETS as PRESETS
from workbench.analyses.figures.parts import part_bars as part_bars
from workbench.analyses.figures.pattern import pattern_map as pattern_map
from workbench.analyses.figures.positions import curves as curves
from workbench.analyses.figures.positions import position_bars as position_bars
from workbench.analyses.figures.positions import position_map as position_map
from workbench.analyses.figures.pruning import pruning_curves as pruning_curves
from workbench.analyses.figures.sinks import binned_curves as binned_curves
from workbench.analyses.figures.sinks import dots as dots
from workbench.analyses.figures.sinks import sink_effects as sink_effects
from workbench.analyses.figures.style import THEMES as THEMES
from workbench.analyses.figures.style import VERMILLION as VERMILLION
from workbench.analyses.figures.style import axis_label as axis_label
from workbench.analyses.figures.style import show_controls as show_controls
from workbench.analyses.figures.style import show_token as show_token
from workbench.analyses.figures.style import token_labels as token_labels
from workbench.analyses.figures.together import excess_curves as excess_curves
from workbench.analyses.figures.together import joint_curves as joint_curves
from workbench.analyses.figures.weights import weight_scatter as weight_scatter
from workbench.analyses.figures.zoo import head_kinds as head_kinds
from workbench.analyses.figures.zoo import head_pairs as head_pairs
from workbench.analyses.figures.zoo import token_pairs as token_pairs

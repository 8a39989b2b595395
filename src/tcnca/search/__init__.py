"""A search for the structure of a TCN: kernel size, dilation factor, depth, and convolutions in a block."""

from tcnca.layers.structure import Structure
from tcnca.search.cost import CostModel, Size
from tcnca.search.search import Limits, SearchReport, run_search, write_json
from tcnca.search.structures import enumerate_structures, pareto_front

__all__ = [
    "CostModel",
    "Limits",
    "SearchReport",
    "Size",
    "Structure",
    "enumerate_structures",
    "pareto_front",
    "run_search",
    "write_json",
]

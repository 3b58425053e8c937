"""Graph-mode TensorFlow models, built for several devices as they are."""

from towers import checkpoints
from towers import cluster
from towers import export
from towers import hooks
from towers import inspection
from towers import metrics
from towers import precise_batch_norm
from towers import verification
from towers.asynchronous import AsyncTraining
from towers.batch_norm import batch_norm
from towers.builder import build_towers
from towers.collectives import all_gather
from towers.collectives import all_reduce
from towers.collectives import merge
from towers.context import current_tower
from towers.context import no_sync
from towers.graph import TowerGraph
from towers.inputs import PerTower
from towers.loss_scale import DynamicLossScale
from towers.moments import Moments
from towers.moments import moments
from towers.tower import Tower
from towers.tower import TowerSpec

__version__ = "0.1.0"

__all__ = (
    "AsyncTraining",
    "DynamicLossScale",
    "Moments",
    "PerTower",
    "Tower",
    "TowerGraph",
    "TowerSpec",
    "all_gather",
    "all_reduce",
    "batch_norm",
    "build_towers",
    "current_tower",
    "merge",
    "moments",
    "no_sync",
)

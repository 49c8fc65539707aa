"""The oracle that drift is measured against: the whole global update, all of its ranks to train (FedHera, Section 6.1).

The paper trains "a high-rank adapter (r = 1024)" and does not say from where; ours starts from the whole update that the
server has, which is what a site without limits would be sent.
"""

from collections.abc import Mapping

from torch import Tensor

from consilium.core.linalg import lowrank
from consilium.core.messages import Tensors
from consilium.strategies.heterogeneous_ranks.exact import ExactServer, global_updates
from consilium.strategies.heterogeneous_ranks.layers import factors, non_lora_tensors, pair
from consilium.strategies.heterogeneous_ranks.ranks import UnequalRanks
from consilium.strategies.strategy import ServerState


def whole_update(strategy: UnequalRanks, state: ServerState, rows: Mapping[str, Tensor]) -> Tensors:
    """Return the server's update as factors, all of them to train, and a head as it is.

    `rows` by layer (rank, in): the oracle's rank, and where a direction without an update starts.
    """
    tensors = dict(non_lora_tensors(state.shared))
    updates = global_updates(state) if isinstance(strategy, ExactServer) else {}
    for layer, initial in rows.items():
        update = updates.get(layer) or lowrank.Update(*factors(state.shared, layer))
        found = lowrank.spectrum(update, len(initial))
        tensors |= pair(layer, lowrank.refactor(found, len(initial), 1.0, initial))
    return tensors

"""The studies of the four papers against what these print: what trains, how large the data are, which numbers stand beside."""

import pytest

from consilium.federation.build import assemble_job
from consilium.federation.cost import own_cost
from consilium.study.study import Cell, load
from tests.conftest import JOBS

STUDIES = JOBS / "studies"
FEDSCA = ["fedsca_table1", "fedsca_table2_polyp", "fedsca_table2_fundus", "fedsca_table3"]


def cells(study: str) -> list[Cell]:
    return load(STUDIES / f"{study}.yaml").cells()


@pytest.mark.parametrize("study", FEDSCA)
def test_every_method_on_adapters_of_fedscas_tables_trains_what_its_table_3_prints(study: str) -> None:
    """Zhang et al., Table 3: 56.2M for each (MiB of float32), so adapters and decoder; -F, all of SAM, has another number."""
    names = {cell.labels["method"]: cell for cell in cells(study) if not cell.labels["method"].endswith("-F")}
    assert {"FedProx", "FedRA", "FedSA", "Ours"} < names.keys()
    trained = {name: 4 * own_cost(assemble_job(cell.load(), cell.base)).trainable / 2**20 for name, cell in names.items()}
    assert trained == pytest.approx(dict.fromkeys(names, 56.2), abs=0.1)

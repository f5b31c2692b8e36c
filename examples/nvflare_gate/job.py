"""hello-pt in NVFlare's simulator with two sites; `--private` puts both filters around it.

python job.py             # as NVFlare's example
python job.py --private   # each site's update is clipped, noisy and counted in the site's ledger

In a deployment the site's filter is not part of the job: each site sets it in its own `privacy.json` (see the page
"Add a privacy budget"). The simulator has no site policy, so here the job names it.
"""

import argparse
from pathlib import Path

from model import Net
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.client.config import TransferType
from nvflare.recipe import SimEnv

parser = argparse.ArgumentParser()
parser.add_argument("--private", action="store_true")
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--folder", default="nvflare-run")
parser.add_argument("--planned", type=int, default=3, help="updates that the sites' ledgers are planned for")
options = parser.parse_args()
folder = Path(options.folder).resolve()

recipe = FedAvgRecipe(
    name="hello-pt",
    model=Net(),
    min_clients=2,
    num_rounds=options.rounds,
    train_script=str(Path(__file__).with_name("train.py")),
    params_transfer_type=TransferType.DIFF,
    aggregator_data_kind="WEIGHT_DIFF",
)
if options.private:
    from bqsgd.integrations.nvflare import OpenUpdatesFilter, PrivateUpdatesFilter

    gate = PrivateUpdatesFilter(
        ledger=str(folder / "{site}.ledger"), study="hello-pt", rounds=options.planned,
        epsilon=50.0, delta=1e-5, clip_norm=1.0,
    )  # fmt: skip
    recipe.add_client_output_filter(gate, tasks=["train"])
    recipe.add_server_input_filter(OpenUpdatesFilter(largest_range=1.0), tasks=["train"])
run = recipe.execute(SimEnv(clients=["site-1", "site-2"], num_threads=2, workspace_root=str(folder)))
print("status:", run.get_status())
print("result:", run.get_result())

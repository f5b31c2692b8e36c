"""hello-pt in NVFlare's simulator with two sites, and the two ways to make it private.

python job.py                     # as NVFlare's example
python job.py --private training  # each site trains with make_private: a sample is protected
python job.py --private updates   # each site's update is clipped and noisy: the whole site is protected

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
parser.add_argument("--private", choices=("training", "updates"))
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--folder", default="nvflare-run")
parser.add_argument("--planned", type=int, default=5, help="rounds that the sites' studies are planned for")
parser.add_argument("--epsilon", type=float, help="3 for private training and 8 for private updates unless given")
options = parser.parse_args()
folder = Path(options.folder).resolve()
ledger = str(folder / "ledgers" / "{site}.ledger")  # in a deployment: on each site's own disk, never in the workspace
(folder / "ledgers").mkdir(parents=True, exist_ok=True)
epsilon = options.epsilon or {None: 0.0, "training": 3.0, "updates": 8.0}[options.private]

recipe = FedAvgRecipe(
    name="hello-pt",
    model=Net(),
    min_clients=2,
    num_rounds=options.rounds,
    train_script=str(Path(__file__).with_name("train_private.py" if options.private == "training" else "train.py")),
    train_args=f"{ledger} {options.planned} {epsilon}" if options.private == "training" else "",
    params_transfer_type=TransferType.DIFF,
    aggregator_data_kind="WEIGHT_DIFF",
)
if options.private:
    from bqsgd.integrations.nvflare import OpenUpdatesFilter, PrivateUpdatesFilter, ThinUpdatesFilter

    gate = ThinUpdatesFilter(bits=4)  # the model is private already
    if options.private == "updates":
        gate = PrivateUpdatesFilter(
            ledger=ledger, study="hello-pt", rounds=options.planned, epsilon=epsilon, delta=1e-5, clip_norm=1.0
        )
    recipe.add_client_output_filter(gate, tasks=["train"])
    recipe.add_server_input_filter(OpenUpdatesFilter(largest_range=1.0), tasks=["train"])
run = recipe.execute(SimEnv(clients=["site-1", "site-2"], num_threads=2, workspace_root=str(folder / "workspace")))
print("status:", run.get_status())
print("result:", run.get_result())

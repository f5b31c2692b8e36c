"""`bqsgd check`: look at data before training, where they are."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from bqsgd._src.cli.output import Json, answer


def check(
    data: Annotated[str, typer.Argument(metavar="DATA")],
    delta: Annotated[float, typer.Option(help="Delta that the training will use.")] = 1e-5,
    json: Json = False,
) -> None:
    """Look for faults in the training data: nothing is trained, spent or sent.

    DATA is the name of a data set, such as digits, or module:name of a
    bqsgd.Task of your own. Every client's data are read in full: rows with
    NaN, labels out of range, constant features, repeated rows, and a delta
    above 1/n are named. What is printed comes from private data without
    noise: keep it where the data are. Exit code 1 means that something was
    found.

    Examples:
      bqsgd check digits
      bqsgd check my_module:task --delta 1e-6
    """
    from bqsgd._src.client.data_check import findings
    from bqsgd._src.client.objectives import objective_of
    from bqsgd._src.client.samples import reader_of
    from bqsgd._src.errors import InvalidParameter
    from bqsgd._src.params import check_delta
    from bqsgd._src.tasks.resolve import resolve

    check_delta("delta", delta)
    resolved = resolve({"task": data} if ":" in data else {"dataset": data})
    task = resolved.make_task()
    if not task.shares:
        raise InvalidParameter(f"{data} holds no client's data here; run this where the data are")
    objective = objective_of(resolved.config, task.make_model(), task.loss_fn, task.forward)
    found: dict[str, list[str]] = {}
    for number, share in enumerate(task.shares):
        samples = reader_of(share, task.sample)
        found[f"client {number}"] = list(findings(samples, objective, form=samples.form(), delta=delta))
    lines = {client: "; ".join(sentences) for client, sentences in found.items() if sentences}
    sound = len(found) - len(lines)
    if sound:
        lines["the others" if lines else "result"] = f"nothing found in the data of {sound} of {len(found)} clients"
    answer(f"Check of {data}", lines, {"clients": found}, json=json)
    print("these findings are private: they come from the data without noise", file=sys.stderr)
    if any(found.values()):
        raise typer.Exit(1)

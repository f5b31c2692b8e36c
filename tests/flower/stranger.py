"""Somebody who can reach a SuperLink and trusts its certificate, and has nothing else: what they try, what they get.

`python stranger.py https://10.77.0.1:9092 ca.crt < node.pub` prints a line per attempt: path and HTTP status.
"""

import ssl
import sys

import httpx
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from flwr.proto.control_pb2 import ListNodesRequest, ListRunsRequest, RegisterNodeRequest, StartRunRequest
from flwr.proto.runtime_pb2 import AcquireTaskRequest, AcquireTaskResponse

TASK = "/v1/runtime/acquire-task"
HEADERS = {"content-type": "application/protobuf"}


def attempts(public_key):
    """Path -> request. The key is an OpenSSH line."""
    point = load_ssh_public_key(public_key).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return {
        "/v1/control/list-runs": ListRunsRequest(),
        "/v1/control/list-nodes": ListNodesRequest(),
        "/v1/control/register-node": RegisterNodeRequest(public_key=point),
        "/v1/control/start-run": StartRunRequest(),
        TASK: AcquireTaskRequest(supported_task_types=["flwr-serverapp", "flwr-clientapp"]),
        "/v1/fleet/../control/list-runs": ListRunsRequest(),
        "/v1/fleet/%2e%2e/control/list-runs": ListRunsRequest(),
        "/v1/control%2flist-runs": ListRunsRequest(),
    }


def main(url, certificate):
    with httpx.Client(base_url=url, verify=ssl.create_default_context(cafile=certificate)) as client:
        for path, request in attempts(sys.stdin.buffer.read()).items():
            reply = client.post(path, content=request.SerializeToString(), headers=HEADERS)
            won = path == TASK and reply.status_code == 200 and AcquireTaskResponse.FromString(reply.content).token
            print(path, reply.status_code, "a task" if won else "", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Who listens where: the sockets of a family of processes, and what is left of it."""

import ipaddress

import psutil

from bqsgd._src.flower.processes import MARK


def marked(**variables):
    """Living processes of any federation whose environment has these variables."""
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            alive = process.status() != psutil.STATUS_ZOMBIE
        except (psutil.Error, OSError):
            continue
        if alive and MARK in environment and variables.items() <= environment.items():
            found.append(process)
    return found


def listeners(processes):
    """(address, port, program) of every socket these processes listen on."""
    found = set()
    for process in processes:
        try:
            for socket in process.net_connections(kind="inet"):
                if socket.status == psutil.CONN_LISTEN:
                    found.add((socket.laddr.ip, socket.laddr.port, process.name()))
        except psutil.Error:
            continue
    return found


def on_loopback(address):
    """Whether nobody outside this machine can reach the address."""
    number = ipaddress.ip_address(address)
    return (getattr(number, "ipv4_mapped", None) or number).is_loopback

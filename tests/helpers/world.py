"""A training of the standard library alone, whose every step takes all ranks: what it writes proves who got on together.

    world.py FOLDER [steps=N] [fails=RANK@GENERATION:STEP,...] [finish=NODE] [linger=S] [hang=1] [save=S]

Rank 0 is the hub: each rank sends it the number of its step and goes on when it has heard from all. A step that was
taken is a line ``time generation world_size rank step node`` in FOLDER/NODE.steps. A rank whose hub, or whose peer, is
gone fails, as a collective does, or hangs, if told so; one that is told to end takes its time to save, if told so; a peer that is only silent makes all hang, as a collective does, too.
"""

import os
import signal
import socket
import sys
import time

folder = sys.argv[1]
options = dict(word.split("=", 1) for word in sys.argv[2:])
rank, size = int(os.environ["ELASTIC_RANK"]), int(os.environ["ELASTIC_WORLD_SIZE"])
generation, node = os.environ["ELASTIC_GENERATION"], os.environ["ELASTIC_NODE"]
place = (os.environ["ELASTIC_MASTER_ADDR"], int(os.environ["ELASTIC_MASTER_PORT"]))
print(f"generation {generation} rank {rank} of {size} on {node} pid {os.getpid()}", flush=True)


def save(*_):
    time.sleep(float(options["save"]))
    os._exit(0)


if "save" in options:
    signal.signal(signal.SIGTERM, save)


def receive(sock):
    data = b""
    while len(data) < 8:
        try:
            more = sock.recv(8 - len(data))
        except OSError:
            more = b""
        if not more and "hang" in options:
            time.sleep(3600)
        if not more:
            sys.exit(f"rank {rank}: connection closed by peer")
        data += more
    return int.from_bytes(data, "big")


def connect():
    end = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection(place, 5)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


if rank == 0:
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(place)
    server.listen(64)
    peers = [server.accept()[0] for _ in range(size - 1)]
else:
    peers = [connect()]
for peer in peers:
    peer.settimeout(None)

fails = options.get("fails", "").split(",")
log = open(os.path.join(folder, f"{node}.steps"), "a", buffering=1)  # noqa: SIM115
for step in range(1, int(options.get("steps", 10**9)) + 1):
    if f"{rank}@{generation}:{step}" in fails:
        sys.exit(7)
    if rank == 0:
        for peer in peers:
            receive(peer)
        stop = os.path.exists(os.path.join(folder, "stop"))
        answer = 0 if stop else step
        for peer in peers:
            peer.sendall(answer.to_bytes(8, "big"))
    else:
        peers[0].sendall(step.to_bytes(8, "big"))
        answer = receive(peers[0])
    log.write(f"{time.time():.3f} {generation} {size} {rank} {step} {node}\n")
    if answer == 0:
        break
    time.sleep(0.02)
if options.get("finish") == node:
    sys.exit(0)
time.sleep(float(options.get("linger", 0)))
print("finished", flush=True)

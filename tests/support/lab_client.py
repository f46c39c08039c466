"""A lab's own client, with msgpack_numpy and zmq alone: moves all joints. Arguments: port, ticks, rad in each."""

import sys
import time

import msgpack
import msgpack_numpy
import zmq

port, ticks, step = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
requests, states = zmq.Context.instance().socket(zmq.REQ), zmq.Context.instance().socket(zmq.SUB)
requests.connect(f"tcp://127.0.0.1:{port}")
states.setsockopt(zmq.CONFLATE, 1)
states.subscribe(b"")
states.connect(f"tcp://127.0.0.1:{port + 1}")


def ask(**request):
    requests.send(msgpack.packb({"id": 0, **request}, default=msgpack_numpy.encode))
    reply = msgpack.unpackb(requests.recv())
    return reply["generation"] if reply["ok"] else sys.exit(reply["error"])


ask(op="hello", name="lab", role="controller", process="lab 1", protocol=2)
state = msgpack.unpackb(states.recv(), object_hook=msgpack_numpy.decode)
target, generation = state["set_point"].copy(), ask(op="arm", generation=state["generation"])
for k in range(ticks):
    target += step
    moment = msgpack.unpackb(states.recv())["moment"]
    ask(op="command", target=target, number=k, generation=generation, stamp=moment)
    time.sleep(0.02)
ask(op="release")

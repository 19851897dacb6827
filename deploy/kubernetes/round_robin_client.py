#!/usr/bin/env python3
"""Requests to several replicas in turn: gRPC's own client-side balancing, nothing in between.

usage: round_robin_client.py --target=dns:///writescope.writescope.svc.cluster.local:50051 [--requests=N]
       [--prompt=TEXT] [--max-tokens=N]

The name stands for every pod (a headless Service); round_robin takes them in turn, and looks the name up
again when a connection ends, which the worker's --max-connection-age sees to. A replica that drains or whose
queue is full refuses at once: the call is tried again on the next one, as long as nothing was answered.
Needs grpcio and the modules that README.md generates from proto/; run it in a pod with the label
writescope-client: "true", since the network policy lets no others in.
"""
import argparse
import json

import grpc
from writescope.v1 import generation_pb2 as pb
from writescope.v1 import generation_pb2_grpc as rpc

SERVICE_CONFIG = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "methodConfig": [{
        "name": [{"service": "writescope.v1.GenerationService"}],
        # UNAVAILABLE is a replica that drains or is gone, RESOURCE_EXHAUSTED one with a full queue.
        "retryPolicy": {"maxAttempts": 4, "initialBackoff": "0.2s", "maxBackoff": "3s", "backoffMultiplier": 2,
                        "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"]}}]}


def connect(target):
    return grpc.insecure_channel(target, options=[
        ("grpc.service_config", json.dumps(SERVICE_CONFIG)),
        ("grpc.max_receive_message_length", -1),
        # While a long prompt is read nothing but these tells a busy worker from a dead machine.
        ("grpc.keepalive_time_ms", 20000),
        # Look the name up at once when a replica goes, not after half a minute.
        ("grpc.dns_min_time_between_resolutions_ms", 1000)])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt", default="Fellow citizens of the Senate")
    parser.add_argument("--max-tokens", type=int, default=16)
    options = parser.parse_args()
    with connect(options.target) as channel:
        # Until every replica has a connection the first ones get all requests.
        grpc.channel_ready_future(channel).result(timeout=60)
        stub = rpc.GenerationServiceStub(channel)
        for _ in range(options.requests):
            call = stub.Generate(pb.GenerateRequest(text=options.prompt,
                                                    stopping=pb.StoppingParams(max_tokens=options.max_tokens)),
                                 timeout=600)
            print("".join(message.text for message in call).replace("\n", " "))


if __name__ == "__main__":
    main()

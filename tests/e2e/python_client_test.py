#!/usr/bin/env python3
"""A Python user's view: a client generated from proto/, health, reflection and error details.

usage: python_client_test.py --venv=DIR (--fake-worker=PROGRAM | --bin=DIR --model=DIR)
"""
import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path[:0] = [HERE, os.path.join(ROOT, "tests", "support", "python")]
import programs
import venv

SERVICE = "writescope.v1.GenerationService"
CONTROL = "writescope.v1.WorkerControlService"
TIMEOUT_S = 60

# A child that asks for a long answer, says so when it comes, and is killed in the middle.
VICTIM = """
import sys
sys.path.insert(0, sys.argv[1])
import grpc
from writescope.v1 import generation_pb2 as pb, generation_pb2_grpc as rpc
stub = rpc.GenerationServiceStub(grpc.insecure_channel(sys.argv[2]))
request = pb.GenerateRequest(text="x", stopping=pb.StoppingParams(max_tokens=1500, ignore_eos=True))
for message in stub.Generate(request, timeout=60):
    if message.token_ids:
        print("streaming", flush=True)
"""


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--venv", required=True)
    parser.add_argument("--fake-worker")
    parser.add_argument("--bin")
    parser.add_argument("--model")
    return parser.parse_args()


def start_worker(arguments):
    if arguments.fake_worker is None:
        return programs.start_worker(arguments.bin, arguments.model, "--vram-budget=64MiB",
                                     "--host-budget=64MiB", "--max-sequences=4", "--max-context=2048")
    worker = programs.Program("worker", [arguments.fake_worker])
    found = worker.await_line(r"^LISTENING generation=(\S+) control=(\S+) metrics=(\S+)")
    worker.generation, worker.control, worker.metrics = found.groups()
    worker.await_line("^READY")
    return worker


class PythonClientTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.stubs = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.stubs.cleanup)
        proto = os.path.join(ROOT, "proto")
        from grpc_tools import protoc
        import grpc_tools
        well_known = os.path.join(os.path.dirname(grpc_tools.__file__), "_proto")
        failed = protoc.main([
            "protoc", f"-I{proto}", f"-I{well_known}", f"--python_out={cls.stubs.name}",
            f"--grpc_python_out={cls.stubs.name}", "writescope/v1/generation.proto",
            "writescope/v1/control.proto"])
        assert not failed, "protoc failed"
        sys.path.insert(0, cls.stubs.name)
        import grpc
        from writescope.v1 import generation_pb2_grpc
        from writescope.v1 import control_pb2_grpc
        cls.worker = start_worker(ARGUMENTS)
        cls.addClassCleanup(cls.worker.__exit__)
        cls.channel = grpc.insecure_channel(cls.worker.generation)
        cls.control_channel = grpc.insecure_channel(cls.worker.control)
        cls.addClassCleanup(cls.channel.close)
        cls.addClassCleanup(cls.control_channel.close)
        cls.generation = generation_pb2_grpc.GenerationServiceStub(cls.channel)
        cls.control = control_pb2_grpc.WorkerControlServiceStub(cls.control_channel)

    def test_streams_a_completion(self):
        from writescope.v1 import generation_pb2 as pb
        request = pb.GenerateRequest(request_id="python", text="The sky is",
                                     sampling=pb.SamplingParams(temperature=0),
                                     stopping=pb.StoppingParams(max_tokens=12, ignore_eos=True))
        messages = list(self.generation.Generate(request, timeout=TIMEOUT_S))
        self.assertTrue(all(m.request_id == "python" for m in messages))
        self.assertEqual(sum(len(m.token_ids) for m in messages), 12)
        self.assertTrue("".join(m.text for m in messages))
        self.assertEqual([m.HasField("finish") for m in messages], [False] * (len(messages) - 1) + [True])
        self.assertEqual(messages[-1].finish.reason, pb.FINISH_REASON_MAX_TOKENS)
        self.assertEqual(messages[-1].usage.generated_tokens, 12)
        self.assertTrue(messages[-1].HasField("placement"))

    def test_tokens_and_model(self):
        from writescope.v1 import generation_pb2 as pb
        tokens = self.generation.Tokenize(pb.TokenizeRequest(text="caf\u00e9 \u6b63"), timeout=TIMEOUT_S)
        self.assertEqual(len(tokens.token_ids), len(tokens.token_bytes))
        text = self.generation.Detokenize(pb.DetokenizeRequest(token_ids=tokens.token_ids),
                                          timeout=TIMEOUT_S).text
        self.assertEqual(text, "caf\u00e9 \u6b63")
        info = self.generation.GetModelInfo(pb.GetModelInfoRequest(), timeout=TIMEOUT_S)
        self.assertGreater(info.limits.max_context_tokens, 0)

    def test_health(self):
        import grpc
        from grpc_health.v1 import health_pb2, health_pb2_grpc
        stub = health_pb2_grpc.HealthStub(self.channel)
        for service in ("", SERVICE):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S)
            self.assertEqual(answer.status, health_pb2.HealthCheckResponse.SERVING, service)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=TIMEOUT_S)
        self.assertEqual(next(watch).status, health_pb2.HealthCheckResponse.SERVING)
        watch.cancel()
        with self.assertRaises(grpc.RpcError) as caught:
            stub.Check(health_pb2.HealthCheckRequest(service="no.such.Service"), timeout=TIMEOUT_S)
        self.assertEqual(caught.exception.code(), grpc.StatusCode.NOT_FOUND)

    def test_reflection(self):
        from google.protobuf.descriptor_pool import DescriptorPool
        from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
        database = ProtoReflectionDescriptorDatabase(self.channel)
        services = set(database.get_services())
        self.assertLessEqual({SERVICE, "grpc.health.v1.Health"}, services)
        self.assertNotIn(CONTROL, services)
        service = DescriptorPool(database).FindServiceByName(SERVICE)
        self.assertEqual(service.FindMethodByName("Generate").output_type.full_name,
                         "writescope.v1.GenerateResponse")
        self.assertIn(CONTROL, ProtoReflectionDescriptorDatabase(self.control_channel).get_services())
        # What is listed can be called by its description, as grpcurl does.
        for channel in (self.channel, self.control_channel):
            database = ProtoReflectionDescriptorDatabase(channel)
            for name in database.get_services():
                self.assertTrue(DescriptorPool(database).FindServiceByName(name).methods, name)

    def failure(self, call):
        """The error of a call and its google.rpc.ErrorInfo, as Python's own library reads it."""
        import grpc
        from google.rpc import error_details_pb2
        from grpc_status import rpc_status
        with self.assertRaises(grpc.RpcError) as caught:
            call()
        rich = rpc_status.from_call(caught.exception)
        info = error_details_pb2.ErrorInfo()
        self.assertTrue(rich.details[0].Unpack(info))
        return caught.exception, info

    def test_errors_have_details(self):
        import grpc
        from writescope.v1 import generation_pb2 as pb
        for request, reason in (
                (pb.GenerateRequest(), "EMPTY_PROMPT"),
                (pb.GenerateRequest(text="x", sampling=pb.SamplingParams(top_p=7)), "INVALID_PARAMETER"),
                (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[4_000_000_000])), "INVALID_TOKEN_ID")):
            error, info = self.failure(lambda r=request: list(self.generation.Generate(r, timeout=TIMEOUT_S)))
            self.assertEqual(error.code(), grpc.StatusCode.INVALID_ARGUMENT)
            self.assertEqual((info.reason, info.domain), (reason, "writescope"))

    def test_half_a_character_is_an_invalid_argument(self):
        import grpc
        call = self.channel.unary_stream(f"/{SERVICE}/Generate")
        error, info = self.failure(lambda: list(call(b"\x12\x02\xe6\xad", timeout=TIMEOUT_S)))
        self.assertEqual(error.code(), grpc.StatusCode.INVALID_ARGUMENT)
        self.assertEqual(info.reason, "INVALID_UTF8")

    def test_client_that_is_killed_frees_its_request(self):
        from writescope.v1 import control_pb2 as pb
        with subprocess.Popen([sys.executable, "-c", VICTIM, self.stubs.name, self.worker.generation],
                              stdout=subprocess.PIPE, text=True) as victim:
            self.assertEqual(victim.stdout.readline(), "streaming\n")
            state = self.control.GetWorkerState(pb.GetWorkerStateRequest(), timeout=TIMEOUT_S)
            self.assertEqual(state.running_requests, 1)
            victim.send_signal(signal.SIGKILL)
        end = time.monotonic() + 10
        while self.control.GetWorkerState(pb.GetWorkerStateRequest(), timeout=TIMEOUT_S).running_requests:
            self.assertLess(time.monotonic(), end, "the request goes on without its client")
            time.sleep(0.02)

    def test_steps_can_be_watched(self):
        from writescope.v1 import control_pb2, generation_pb2
        watch = self.control.WatchSteps(control_pb2.WatchStepsRequest(), timeout=TIMEOUT_S)
        watch.initial_metadata()  # From here on no step is missed.
        request = generation_pb2.GenerateRequest(text="x", stopping=generation_pb2.StoppingParams(max_tokens=3))
        list(self.generation.Generate(request, timeout=TIMEOUT_S))
        first, second = next(watch).step, next(watch).step
        self.assertEqual(second.step, first.step + 1)
        watch.cancel()


if __name__ == "__main__":
    ARGUMENTS = parse_arguments()
    venv.enter(ARGUMENTS.venv)
    unittest.main(argv=sys.argv[:1], verbosity=2)

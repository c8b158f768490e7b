"""The tap's HTTP side on a GPU engine: captures among production traffic, every one proven.

Starts vLLM's own API server (dummy weights, a byte tokenizer made on the spot) with the tap's middleware and
optionally a draft of random weights, keeps streaming chats on it, and captures prompts through
`POST /v1/hidden_states`: lengths from 1 token to several steps, prompt alone and generated, slices joined and
their token ids compared as an extractor does. The endpoint proves each capture against the engine's own top
tokens (`TAPHOUSE_TAP_PROOF_INTERVAL_S`). Also: clients that leave, and a forged opt-in. Prints JSON; exits
with 1 if anything is not as it should be. Standard library and the engine's environment only.

    python3 benchmarks/tap_http_gpu.py                 one card, Llama-8B shape
    python3 benchmarks/tap_http_gpu.py --draft         beside an EAGLE-3 draft
    python3 benchmarks/tap_http_gpu.py --checkpoint DIR --images 40
                                                       a checkpoint that sees, and chats about pictures
    python3 benchmarks/tap_http_gpu.py --tiny          a dry run on a CPU engine
"""

from __future__ import annotations

import argparse
import base64
import http.client
import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.tap_bench import shapes

from taphouse import slices
from taphouse_tap.__main__ import launch_args

URL = "/v1/hidden_states"
START_S = 400


def emit(what: str, **values: Any) -> None:
    print(json.dumps({"result": what, **values}), flush=True)


def shape_of(directory: Path) -> shapes.Shape:
    """What to run on a checkpoint that is there: short prompts, layers at both ends and between."""
    config = json.loads((directory / "config.json").read_text())
    text = config.get("text_config", config)
    last = int(text["num_hidden_layers"])
    layers = tuple(sorted({2, last // 2, last - 1, last}))
    return shapes.Shape(text, layers, kv_gib=1.0, max_model_len=1024, max_num_batched_tokens=1024)


def checkpoint(directory: Path, shape: shapes.Shape) -> None:
    """A configuration and a tokenizer of bytes; there are no weights."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(dict(shape.config)))
    words = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    fast.save_pretrained(directory)


def with_draft(directory: Path, shape: shapes.Shape) -> list[str]:
    """Flags of an engine that serves with an EAGLE-3 draft of random weights, whose configuration is made."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(dict(shapes.eagle3_config(shape.config))))
    options = {"method": "eagle3", "model": str(directory), "num_speculative_tokens": shapes.DRAFT_TOKENS}
    return ["--speculative-config", json.dumps(options)]


class Server:
    """vLLM's API server with the tap."""

    def __init__(self, port: int, vocabulary: int, longest: int) -> None:
        self.port, self.vocabulary, self.longest = port, vocabulary, longest

    def ask(self, method: str, path: str, body: Any = None, timeout: float = 300) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read()
            return answer.status, json.loads(text) if text.startswith(b"{") else text
        finally:
            connection.close()

    def status(self) -> dict[str, Any]:
        return self.ask("GET", f"{URL}/status")[1]

    def prompt(self, numbers: random.Random, length: int) -> list[int]:
        return [numbers.randrange(10, self.vocabulary - 10) for _ in range(length)]

    def capture(self, seed: int) -> dict[str, Any]:
        """One capture as an extractor takes it; what was found."""
        numbers = random.Random(seed)
        length = numbers.choice([1, 17, 300, self.longest // 3, self.longest])
        body = {
            "prompt": self.prompt(numbers, length),
            "max_tokens": numbers.choice([1, 40]),
            "ignore_eos": numbers.random() < 0.5,
            "temperature": numbers.choice([0.0, 0.0, 1.0]),
        }
        for _ in range(60):
            code, answer = self.ask("POST", URL, body)
            if code != 429:
                break
            time.sleep(1)
        if code != 200:
            return {"ok": False, "why": f"{code}: {answer}"}
        (item,) = answer["data"]
        paths = [Path(piece["path"]) for piece in item["slices"]]
        try:
            states = slices.join_slices(paths, item["token_ids"][: item["rows"]], answer["layers"])
        except (slices.SliceError, OSError) as error:
            return {"ok": False, "why": str(error)}
        finally:
            slices.release(paths[0].parent, item["tag"])
        right = item["rows"] == len(item["token_ids"]) - 1 and item["token_ids"][:length] == body["prompt"]
        return {"ok": right, "rows": len(states), "proven": "witness" in item}

    def chat(self, seed: int) -> bool:
        """One streamed chat; whether it ended as it should."""
        body = {
            "model": "target",
            "messages": [{"role": "user", "content": f"{seed} tell me a story " * 20}],
            "max_tokens": 60,
            "stream": True,
            "ignore_eos": True,
        }
        code, text = self.ask("POST", "/v1/chat/completions", body)
        return code == 200 and bytes(text).rstrip().endswith(b"[DONE]")

    def look(self, seed: int, url: str = "/v1/chat/completions") -> tuple[int, Any]:
        """A greedy chat about a picture of noise, 112 pixels square; the answer's status and token ids."""
        import numpy as np
        from PIL import Image

        noise, out = np.random.default_rng(seed).integers(0, 256, (112, 112, 3), np.uint8), io.BytesIO()
        Image.fromarray(noise).save(out, "PNG")
        picture = {"url": f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"}
        parts = [{"type": "image_url", "image_url": picture}, {"type": "text", "text": "What is this?"}]
        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 16, "temperature": 0}
        if url != URL:
            body |= {"model": "target", "ignore_eos": True, "return_token_ids": True}
        code, answer = self.ask("POST", url, body)
        return code, answer["choices"][0]["token_ids"] if code == 200 else answer

    def leave(self, seed: int) -> None:
        """A client that asks and goes away."""
        numbers = random.Random(seed)
        body = {"prompt": self.prompt(numbers, self.longest), "max_tokens": 200, "ignore_eos": True}
        try:
            self.ask("POST", URL, body, timeout=numbers.uniform(0.01, 0.5))
        except OSError:
            return


@contextmanager
def serving(args: argparse.Namespace, work: Path) -> Iterator[Server]:
    if args.checkpoint:
        shape, model, load = shape_of(args.checkpoint), args.checkpoint, "auto"
    else:
        shape, model, load = shapes.SHAPES["tiny" if args.tiny else args.shape], work / "model", "dummy"
        checkpoint(model, shape)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    tap = launch_args(list(shape.layers), tensor_parallel_size=args.tensor_parallel_size)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "target", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--load-format", load, "--dtype", "bfloat16", "--max-num-seqs", "64"]
    command += ["--max-model-len", str(shape.max_model_len)]
    command += ["--max-num-batched-tokens", str(shape.max_num_batched_tokens)]
    command += ["--tensor-parallel-size", str(args.tensor_parallel_size), *tap]
    command += ["--middleware", "taphouse_tap.middleware.HiddenStatesMiddleware"]
    if args.images:
        command += ["--limit-mm-per-prompt", json.dumps({"vision_chunk": 2})]
    if args.tiny:
        command += ["--enforce-eager"]
    if args.draft:
        command += with_draft(work / "draft", shape)
    environment = {
        **os.environ,
        "VLLM_PLUGINS": "",
        "HF_HUB_OFFLINE": "1",
        "TAPHOUSE_TAP_SLICE_DIR": "/dev/shm/taphouse-http",
        "TAPHOUSE_TAP_PROOF_INTERVAL_S": "0.000001",
        "TAPHOUSE_TAP_BUSY_MS": "1000",  # what is asked here is whether captures are right, not isolation
        **({"VLLM_CPU_KVCACHE_SPACE": "1"} if args.tiny else {}),
    }
    with (work / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    server = Server(port, int(shape.config["vocab_size"]), shape.max_model_len - 300)
    try:
        _await_capture(server, process)
        yield server
    except BaseException:
        print((work / "server.log").read_text(errors="replace")[-6000:], flush=True)
        raise
    finally:
        with suppress(ProcessLookupError):  # it ended by itself
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def _await_capture(server: Server, process: subprocess.Popen[bytes]) -> None:
    deadline, last = time.monotonic() + START_S, None
    while time.monotonic() < deadline and process.poll() is None:
        try:
            last = server.status()
            if last["capture"] == "on":
                return
        except (OSError, ValueError, KeyError, TypeError):
            pass
        time.sleep(0.5)
    raise SystemExit(f"capture did not start: {last}")


def run(server: Server, captures: int, leaving: int, images: int) -> bool:
    """Chats, captures, pictures and clients that leave, all at once; then what is left of them."""
    stop, chats = threading.Event(), list[bool]()
    alone = [server.look(seed) for seed in range(images)]

    def chatting(first: int) -> None:
        for seed in range(first, 10**9):
            if stop.is_set():
                return
            chats.append(server.chat(seed))

    customers = [threading.Thread(target=chatting, args=(n * 10**6,)) for n in range(6)]
    for customer in customers:
        customer.start()
    with ThreadPoolExecutor(16) as pool:
        beside_chats = list(pool.map(server.look, range(images)))
        began = time.monotonic()
        gone = [pool.submit(server.leave, 5000 + n) for n in range(leaving)]
        looking = [pool.submit(server.look, seed) for seed in range(images)]
        found = list(pool.map(server.capture, range(captures)))
        for future in gone:
            future.result()
        seen = [future.result() for future in looking]
    took = time.monotonic() - began
    forged = {"taphouse": {"tag": "0" * 32, "prompt_len": 5, "max_rows": 9, "sig": "0" * 64}}
    body = {"model": "target", "prompt": [11, 12, 13, 14, 15], "max_tokens": 5, "vllm_xargs": forged}
    forged_code, _ = server.ask("POST", "/v1/completions", body)
    opted_in = server.look(0, URL) if images else None
    stop.set()
    for customer in customers:
        customer.join()
    time.sleep(10)
    left = server.status()
    good = sum(item["ok"] for item in found)
    emit(
        "http",
        captures=len(found),
        good=good,
        proven=sum(item.get("proven", False) for item in found),
        rows=sum(item.get("rows", 0) for item in found),
        seconds=round(took, 1),
        wrong=[item["why"] for item in found if not item["ok"]][:3],
        chats=len(chats),
        chats_failed=chats.count(False),
        clients_that_left=leaving,
        in_flight_afterwards=left["in_flight"],
        pinned_bytes_afterwards=[rank["memory"]["pinned_bytes"] for rank in left["ranks"]],
        forged_answered=forged_code,
        images=images,
        images_failed=sum(code != 200 for code, _ in [*alone, *beside_chats, *seen]),
        images_answered_otherwise_than_alone=sum(a != b for a, b in zip(alone, seen, strict=True)),
        images_answered_otherwise_beside_chats=sum(a != b for a, b in zip(alone, beside_chats, strict=True)),
        image_that_opted_in=opted_in,
        counters=left["counters"],
        mode=left["mode"],
        versions=left["versions"],
        canary=left["canary"],
    )
    clean = left["in_flight"]["claims"] == 0 and all(r["memory"]["pinned_bytes"] == 0 for r in left["ranks"])
    pictures = all(code == 200 for code, _ in [*alone, *beside_chats, *seen]) and (
        opted_in is None or opted_in[0] == 422
    )
    return good == len(found) and all(chats) and clean and pictures and forged_code in (200, 400)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="tiny shape on a CPU engine: a dry run")
    parser.add_argument("--shape", choices=sorted(shapes.SHAPES), default="llama-8b")
    parser.add_argument("--draft", action="store_true", help="an EAGLE-3 draft of random weights beside it")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--checkpoint", type=Path, help="a checkpoint with weights and tokenizer")
    parser.add_argument("--images", type=int, default=0, help="chats about a picture, for one that sees")
    parser.add_argument("--captures", type=int, default=200)
    parser.add_argument("--leaving", type=int, default=200, help="clients that go away")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as work, serving(args, Path(work)) as server:
        return int(not run(server, args.captures, args.leaving, args.images))


if __name__ == "__main__":
    raise SystemExit(main())

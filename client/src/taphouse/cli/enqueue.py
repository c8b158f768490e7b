"""`taphouse enqueue`: send a dataset, and wait for it if asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from taphouse.cli import sampling
from taphouse.cli.exits import UsageProblem
from taphouse.cli.extract import template_arguments
from taphouse.cli.session import Session, with_session

if TYPE_CHECKING:
    from taphouse.client import Taphouse
    from taphouse.wire import Job, JobOptions

__all__ = ["enqueue"]


@with_session()
def enqueue(
    session: Session,
    dataset: Annotated[
        str | None,
        typer.Argument(
            help="JSONL with messages, prompt or text in each row; - for stdin.", show_default=False
        ),
    ] = None,
    *,
    server_path: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Instead of DATASET: a file that the service reads itself, under its dataset roots.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the job, for people.", show_default=False)] = None,
    max_samples: Annotated[
        int | None, typer.Option(min=1, help="Send only the first rows.", show_default=False)
    ] = None,
    allow_bad_rows: Annotated[
        bool,
        typer.Option(
            "--allow-bad-rows",
            help="Send rows too that can't become prompts; the job counts each as failed.",
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check every row's form and every option here, and send nothing."),
    ] = False,
    wait: Annotated[
        bool,
        typer.Option("--wait", "--follow", "-w", help="Stay until the job has ended, with a progress bar."),
    ] = False,
    fail_on_error: Annotated[
        bool, typer.Option("--fail-on-error", help="With --wait: exit with 5 when a row made no sample.")
    ] = False,
    batch_size: Annotated[
        int | None,
        typer.Option(
            help="Rows of one batch, which makes one shard.",
            rich_help_panel=sampling.PANEL,
            show_default=False,
        ),
    ] = None,
    max_shard_bytes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Cut a batch whose states, uncompressed, would pass so many; one row alone may.",
            rich_help_panel=sampling.PANEL,
            show_default=False,
        ),
    ] = None,
    max_tokens: sampling.MaxTokens = None,
    temperature: sampling.Temperature = None,
    top_p: sampling.TopP = None,
    seed: sampling.Seed = None,
    stop: sampling.Stop = None,
    ignore_eos: sampling.IgnoreEos = False,
    layers: sampling.Layers = None,
    max_length: sampling.MaxLength = None,
    priority: sampling.Priority = None,
    chat_template_kwargs: sampling.ChatTemplateKwargs = None,
    again: Annotated[
        bool, typer.Option("--again", help="Enqueue rows that were enqueued before with the same options.")
    ] = False,
    key: Annotated[
        str | None,
        typer.Option(
            help="Idempotency key of yours: sent again with it, the job that is there is printed.",
            show_default=False,
        ),
    ] = None,
    job_priority: Annotated[
        int | None, typer.Option(help="Jobs with a higher one are fed first.", show_default=False)
    ] = None,
    max_attempts: Annotated[
        int | None,
        typer.Option(help="Crashed runs of a batch before its rows are tried apart.", show_default=False),
    ] = None,
    stop_on_error: Annotated[
        bool, typer.Option("--stop-on-error", help="The first failed row ends the job.")
    ] = False,
    output_prefix: Annotated[
        str | None, typer.Option(help="Begins the names of its shards.", show_default=False)
    ] = None,
) -> None:
    """Queue a dataset for extraction; prints the job.

    Rows are checked here first: a file before anything is sent, stdin while it is sent.

    taphouse enqueue dataset.jsonl --max-tokens 512 --wait --fail-on-error
    zcat big.jsonl.gz | taphouse enqueue - --name big
    """
    options = sampling.job_options(
        layers,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop=stop,
        ignore_eos=ignore_eos,
        batch_size=batch_size,
        max_shard_bytes=max_shard_bytes,
        max_length=max_length,
        priority=priority,
        chat_template_kwargs=template_arguments(chat_template_kwargs),
        job_priority=job_priority,
        max_attempts=max_attempts,
        on_error="fail" if stop_on_error else None,
        output_prefix=output_prefix,
    )
    if (dataset is None) == (server_path is None):
        raise UsageProblem("give one dataset", "name a JSONL file, `-` for stdin, or --server-path")
    if server_path is not None and (dry_run or allow_bad_rows or max_samples is not None):
        raise UsageProblem(
            "--dry-run, --allow-bad-rows and --max-samples need the rows here",
            "leave them out, or --server-path",
        )
    if fail_on_error and not wait:
        raise UsageProblem("--fail-on-error needs --wait", "add --wait")
    if dry_run:
        _check(session, str(dataset), options, limit=max_samples, allow_bad=allow_bad_rows)
        return
    with session.client() as client:
        if server_path is not None:
            job = client.enqueue_path(
                server_path, options, name=name or _name_of(server_path), again=again, key=key
            )
        else:
            upload = _Upload(str(dataset), options, name, max_samples, allow_bad_rows, again, key)
            job = upload.run(session, client)
        _report(session, client, job, wait, fail_on_error)


@dataclass(frozen=True)
class _Upload:
    """A dataset of this side on its way: `limit` rows of it, or all."""

    dataset: str
    options: JobOptions
    name: str | None
    limit: int | None
    allow_bad: bool
    again: bool
    key: str | None

    def run(self, session: Session, client: Taphouse) -> Job:
        """Check and send. A regular file is read twice; what can be read once is checked as it goes."""
        from taphouse.cli.dataset import STDIN, checked, lines_of, open_dataset, take
        from taphouse.cli.terminal import bytes_bar

        name = self.name or (None if self.dataset == STDIN else _name_of(self.dataset))
        with open_dataset(self.dataset) as (file, total):
            if total is not None and not self.allow_bad:
                self._check(session, file, total)
            chunks: BinaryIO | Iterator[bytes] = file
            if total is None and not self.allow_bad:
                chunks = take(checked(lines_of(file), self.options.max_tokens > 1), self.limit)
            elif self.limit is not None:
                chunks = take(lines_of(file), self.limit)
            with bytes_bar(session.err, "uploading", total if self.limit is None else None) as step:
                return client.enqueue(
                    chunks, self.options, name=name, progress=step, again=self.again, key=self.key
                )

    def _check(self, session: Session, file: BinaryIO, total: int) -> None:
        from taphouse.cli.dataset import inspect_rows, lines_of, refuse_bad
        from taphouse.cli.terminal import bytes_bar

        with bytes_bar(session.err, "checking", total if self.limit is None else None) as step:
            report = inspect_rows(lines_of(file, step), self.limit, generate=self.options.max_tokens > 1)
        refuse_bad(report, self.dataset)
        file.seek(0)


def _name_of(path: str) -> str | None:
    name = path.rstrip("/").rpartition("/")[2][:200]
    return "".join(c if c.isprintable() else "?" for c in name) or None


def _report(session: Session, client: Taphouse, job: Job, wait: bool, fail_on_error: bool) -> None:
    from taphouse.cli import render_jobs
    from taphouse.cli.waiting import raise_for_outcome, wait_for

    if not wait:
        session.show(job, lambda: render_jobs.job_line(job))
        if not session.json:
            session.note(f"follow it with: taphouse watch · taphouse jobs {job.id}")
        return
    session.note(f"job {job.id}: {job.rows:,} rows; Ctrl-C stops the waiting, not the job")
    job = wait_for(session, client, job)
    session.show(job, lambda: render_jobs.job_details(job))
    raise_for_outcome(job, fail_on_error)


def _check(
    session: Session, dataset: str, options: JobOptions, *, limit: int | None, allow_bad: bool
) -> None:
    """Read every row, say what is there, and send nothing."""
    from taphouse.cli import render_jobs
    from taphouse.cli.dataset import inspect_rows, lines_of, open_dataset, refuse_bad

    with open_dataset(dataset) as (file, _):
        report = inspect_rows(lines_of(file), limit, generate=options.max_tokens > 1)
    batches = -(-report.rows // options.batch_size)
    document = {
        "dry_run": True,
        "rows": report.rows,
        "bad": report.bad,
        "kinds": dict(report.kinds),
        "bytes": report.bytes,
        "batches": batches,
        "over_row_bytes": report.long,
        "options": options.model_dump(mode="json"),
        "problems": [{"line": p.line, "reason": p.reason} for p in report.problems],
    }
    session.show(document, lambda: render_jobs.dry_run(report, options, batches))
    if not (report.bad and allow_bad):
        refuse_bad(report, dataset)

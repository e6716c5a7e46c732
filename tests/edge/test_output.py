"""The output thread with real pipes and files: nothing is lost, and nothing that happens to a console stops it."""

import asyncio
import contextlib
import logging
import os
import re
import select
import subprocess
import threading

import pytest

from elastic_adapter.core.output import ConsoleHandler, LineFormatter, Output, Stream


class Pipe:
    """A pipe whose ends are closed with the test, unless somebody did before."""

    def __init__(self):
        self.reader, self.writer = os.pipe()
        self._open = {self.reader, self.writer}

    def write(self, data):
        while data:
            data = data[os.write(self.writer, data) :]

    def give_reader(self):
        """Whoever takes it closes it."""
        self._open.discard(self.reader)
        return self.reader

    def close(self, fd):
        if fd in self._open:
            self._open.discard(fd)
            os.close(fd)

    def finish(self):
        for fd in tuple(self._open):
            self.close(fd)


class Console:
    """The other end of a console: collects what is shown."""

    def __init__(self):
        self.pipe = Pipe()
        self.fd = self.pipe.writer
        self._text = b""
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._collect)
        self._thread.start()

    def _collect(self):
        while data := os.read(self.pipe.reader, 65536):
            with self._changed:
                self._text += data
                self._changed.notify_all()

    def shows(self, text):
        """Wait until the console has shown this."""
        with self._changed:
            return self._changed.wait_for(lambda: text in self._text, timeout=20)

    def all(self):
        """Everything; nobody writes any more."""
        self.pipe.close(self.fd)
        self._thread.join()
        return self._text


@pytest.fixture
def pipe():
    pipes = []

    def make():
        pipes.append(Pipe())
        return pipes[-1]

    yield make
    for each in pipes:
        each.finish()


@pytest.fixture
def console():
    console = Console()
    yield console
    console.all()
    console.pipe.finish()


@pytest.fixture
def output():
    output = Output()
    yield output
    output.close()


@pytest.fixture
def show(pipe, console):
    """Attaches one stream, writes these pieces, one read for each, and gives what the console got by its end."""

    def run(*pieces, **options):
        output = Output()
        source = pipe()
        stream = Stream(source.give_reader(), **{"console": console.fd, **options})

        async def main():
            output.attach(stream)
            for piece in pieces:
                await asyncio.gather(asyncio.to_thread(source.write, piece), output.drained(stream))
                await output.drained(stream)
            source.close(source.writer)
            await output.drained(stream)

        asyncio.run(main())
        output.close()
        return console.all()

    return run


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"one\ntwo\n"], b"> one\n> two\n"),
        ([b"on", b"e\ntw", b"o\n"], b"> one\n> two\n"),
        ([b"no newline"], b"> no newline\n"),
        ([b"\n\n"], b"> \n> \n"),
        ([b""], b""),
        ([b"10%\r20%\rdone\n"], b"> 10%\r> 20%\r> done\n"),
        ([b"\r10%", b"\r20%", b"\n"], b"> \r> 10%\r> 20%\n"),
        ([b"dos\r\nline\r\n"], b"> dos\r\n> line\r\n"),
        ([b"dos\r", b"\nline\r", b"\n"], b"> dos\r\n> line\r\n"),
        ([b"bar\r", b"bar\r", b"end"], b"> bar\r> bar\r> end\n"),
        ([b"\xff\x00\x1b[31m\xfe\n\xc3", b"\xb6\n"], b"> \xff\x00\x1b[31m\xfe\n> \xc3\xb6\n"),
    ],
)
def test_every_line_has_its_prefix(show, pieces, expected):
    """Each line begins with the prefix, however it ends and however it is cut into reads; bytes stay as they are."""
    assert show(*pieces, prefix=b"> ") == expected


def test_very_long_line_is_broken_not_kept(show):
    """A line without end is shown in pieces, each with its prefix, and nothing of it is lost."""
    shown = show(b"x" * 300_000 + b"\nend\n", prefix=b"> ")
    lines = shown.splitlines()
    assert lines[-1] == b"> end"
    assert len(lines) > 2
    assert all(line.startswith(b"> ") for line in lines)
    assert b"".join(line.removeprefix(b"> ") for line in lines) == b"x" * 300_000 + b"end"


def test_tail_keeps_the_last_bytes(output, pipe):
    """The end of a stream is kept, shown or not, and no more than that."""
    source = pipe()
    stream = Stream(source.give_reader(), None)

    async def main():
        output.attach(stream)
        source.write(b"".join(b"line %d\n" % number for number in range(5000)))
        await output.drained(stream)

    asyncio.run(main())
    assert stream.tail.endswith(b"line 4998\nline 4999\n")
    assert 1000 < len(stream.tail) < 20_000


def test_files_get_the_bytes_and_the_filtered_lines(show, tmp_path):
    """A stream's file has its bytes unchanged; the filtered file has the lines that contain one of the words."""
    with open(tmp_path / "all", "ab", buffering=0) as everything, open(tmp_path / "some", "ab", buffering=0) as some:
        shown = show(
            b"loss 1\nnoise\nac",
            b"c 2\nbye",
            prefix=b"[n 0] ",
            file=everything,
            filters=(b"loss", b"acc"),
            filtered=some,
        )
        assert everything.closed
        assert some.closed
    assert (tmp_path / "all").read_bytes() == b"loss 1\nnoise\nacc 2\nbye"
    assert (tmp_path / "some").read_bytes() == b"[n 0] loss 1\n[n 0] acc 2\n"
    assert shown == b"[n 0] loss 1\n[n 0] noise\n[n 0] acc 2\n[n 0] bye\n"


def test_stream_that_is_not_shown(show, tmp_path):
    """Without a console only the file gets the output."""
    with open(tmp_path / "all", "ab", buffering=0) as file:
        assert show(b"quiet\n", b"and unfinished", console=None, file=file) == b""
    assert (tmp_path / "all").read_bytes() == b"quiet\nand unfinished"


def test_full_disk_does_not_stop_the_output(show, caplog):
    """A file that takes no more is given up with a word of warning; the console goes on."""
    with open("/dev/full", "wb", buffering=0) as full, open("/dev/full", "wb", buffering=0) as filtered:
        shown = show(b"one\n", b"two\n", file=full, filters=(b"one",), filtered=filtered)
    assert shown == b"one\ntwo\n"
    assert [record.getMessage() for record in caplog.records] == [
        "/dev/full is not written any more: No space left on device"
    ] * 2


def test_streams_of_several_workers_keep_their_lines_whole(output, console):
    """Lines of workers that write at the same time are never mixed within a line."""
    code = "for i in $(seq 2000); do echo $1 $1 $1 $1 $1 $1; done"
    workers = [
        subprocess.Popen(["sh", "-c", code, "sh", name * 20], stdout=subprocess.PIPE, bufsize=0) for name in "abc"
    ]
    for worker in workers:
        output.attach(Stream(os.dup(worker.stdout.fileno()), console.fd, b"> "))
        worker.stdout.close()
    for worker in workers:
        worker.wait()
    output.close()
    lines = console.all().splitlines()
    expected = {b"> " + b" ".join([name * 20] * 6) for name in (b"a", b"b", b"c")}
    assert set(lines) == expected
    assert len(lines) == 6000


def test_our_own_lines_come_in_order(output, console):
    """Lines of our own are shown in the order of writing, all of them, before the output is closed."""
    for number in range(1000):
        output.write(console.fd, b"%d\n" % number)
    output.close()
    assert console.all() == b"".join(b"%d\n" % number for number in range(1000))


def test_closed_console_does_not_stop_the_reading(output, pipe, tmp_path):
    """When nobody reads the console any more (EPIPE), workers can still write, and files still get it all."""
    console, source = pipe(), pipe()
    console.close(console.reader)
    with open(tmp_path / "all", "ab", buffering=0) as file:
        stream = Stream(source.give_reader(), console.writer, file=file)

        async def main():
            output.attach(stream)
            for _ in range(3):
                source.write(b"x" * 60_000 + b"\n")
                await output.drained(stream)
            source.close(source.writer)
            await output.drained(stream)

        asyncio.run(main())
    assert (tmp_path / "all").stat().st_size == 3 * 60_001


def test_drained_has_everything_written_before(output, pipe, console):
    """After ``drained`` the tail, the file and the console have all that a worker wrote before."""
    source = pipe()
    stream = Stream(source.give_reader(), console.fd)

    async def main():
        output.attach(stream)
        for number in range(200):
            source.write(b"%d " % number * 100 + b"\n")
            await output.drained(stream)
            assert stream.tail.endswith(b"%d \n" % number)
        source.close(source.writer)
        await output.drained(stream)
        await output.drained(stream)

    asyncio.run(main())
    assert stream.ended
    assert console.shows(b"199 199 \n")


def test_drained_does_not_wait_for_a_writer_without_end(output, pipe):
    """A leftover child that prints without pause does not keep ``drained`` from returning, nor other streams."""
    endless, other = pipe(), pipe()
    process = subprocess.Popen(["yes"], stdout=endless.writer)
    try:
        select.select([endless.reader], [], [])
        streams = [Stream(each.give_reader(), None) for each in (endless, other)]

        async def main():
            for stream in streams:
                output.attach(stream)
            other.write(b"other\n")
            for stream in streams:
                await asyncio.wait_for(output.drained(stream), 20)

        asyncio.run(main())
        assert streams[0].tail.endswith(b"y\n")
        assert streams[1].tail == b"other\n"
    finally:
        process.kill()
        process.wait()


def test_close_gives_up_on_a_console_that_takes_nothing(pipe):
    """A console that does not take its output holds up the end only for the time that is allowed for it."""
    console, source = pipe(), pipe()
    output = Output()
    stream = Stream(source.give_reader(), console.writer)
    output.attach(stream)
    for _ in range(4):
        output.write(console.writer, b"x" * 65536)
    output.close(within_s=0.1)
    # The thread is still at it; once the console reads again, it comes to its end.
    read = 0
    while read < 4 * 65536:
        read += len(os.read(console.reader, 65536))
    output.close()
    assert stream.ended


def test_close_shows_what_is_left(pipe, console):
    """What workers wrote before the end is shown, an unfinished line included."""
    source = pipe()
    output = Output()
    stream = Stream(source.give_reader(), console.fd, b"> ")
    output.attach(stream)
    source.write(b"one\ntwo")
    output.close()
    assert stream.ended
    assert console.all() == b"> one\n> two\n"


def test_console_that_somebody_made_non_blocking(output, console):
    """A terminal that another program left non-blocking gets everything all the same."""
    os.set_blocking(console.fd, False)
    output.write(console.fd, b"x" * 1_000_000 + b"end")
    assert console.shows(b"end")
    output.close()
    assert len(console.all()) == 1_000_003


@pytest.mark.parametrize(
    ("level", "message", "expected"),
    [
        (logging.INFO, "all is well", r"INFO \[agent\] all is well"),
        (logging.ERROR, "it failed", r"ERROR \[agent\] it failed \(node n0, job j\)"),
        (logging.ERROR, "it failed\n  more", r"ERROR \[agent\] it failed \(node n0, job j\)\n  more"),
    ],
)
def test_log_lines(output, console, level, message, expected):
    """Our own lines have time, level and module; errors name node and job in their first line."""
    logger = logging.Logger("elastic_adapter.core.agent")  # noqa: LOG001 (one that nobody else sees)
    handler = ConsoleHandler(output)
    handler.setFormatter(LineFormatter("n0", "j"))
    with _as_stderr(console):
        logger.addHandler(handler)
        logger.log(level, "%s", message)
        assert console.shows(message.splitlines()[-1].encode())
        output.close()
    text = console.all().decode()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z " + expected + "\n", text)


@contextlib.contextmanager
def _as_stderr(console):
    kept = os.dup(2)
    os.dup2(console.fd, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)

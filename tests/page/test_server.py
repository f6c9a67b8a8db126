"""The server shows the runs it was given, to this machine, and nothing else."""

import http.client
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from distflow.errors import ConfigError
from distflow.page.server import MAX_CONNECTIONS, bind
from limits import load_factor
from page.serving import TOKEN, serving
from recorded import write_run


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "secret.txt").write_text("hunter2")
    write_run(folder / "run", steps=3, workers=3)
    with serving(folder / "run") as port:
        yield port


def ask(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20 * load_factor())
    connection.putrequest(method, f"/{TOKEN}{path}", skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, body, response.headers


def test_every_request_of_the_page_is_answered(port: int) -> None:
    for path in (
        "/api/runs",
        "/api/overview?run=0",
        "/api/metrics?run=0",
        "/api/plan?run=0",
        "/api/changed?run=0",
        "/api/samples?run=0",
        "/api/lanes?run=0&step=2",
        "/api/lanes?run=0&step=2&ranks=1-2",
        "/api/step?run=0&step=2",
        "/api/sample?run=0&step=2&split=train&id=8",
    ):
        status, body, _ = ask(port, path)
        assert status == 200, (path, body)
        assert json.loads(body), path
    status, body, _ = ask(port, "/")
    assert status == 200
    assert b'src="uPlot.iife.js"' in body


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8265", "127.0.0.1.evil.example", "169.254.169.254", ""])
def test_another_name_for_this_machine_is_refused(port: int, host: str) -> None:
    """A page of the web whose name is made to resolve to 127.0.0.1 sends its own name."""
    for path in ("/", "/api/overview?run=0", "/main.js"):
        status, body, _ = ask(port, path, Host=host)
        assert status == 400, (path, status)
        assert b"grpo" not in body


def test_it_listens_on_loopback_only(port: int) -> None:
    sock = bind(0)
    assert sock.getsockname()[0] == "127.0.0.1"
    sock.close()
    own = socket.gethostbyname(socket.gethostname())
    if not own.startswith("127."):
        with pytest.raises(OSError, match=r"refused|timed out"):
            socket.create_connection((own, port), 3)


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.txt",
        "/..%2fsecret.txt",
        "/%2e%2e/secret.txt",
        "/....//secret.txt",
        "/run/metrics.jsonl",
        "/metrics.jsonl",
        "/static/main.js",
        "//etc/passwd",
        "/etc/passwd",
        "/C:%5Cboot.ini",
        "/main.js%00.html",
        "/api/../secret.txt",
        "/api/..%2f..%2fsecret.txt",
        "/api/__class__",
        "/api/overview/../../secret.txt",
    ],
)
def test_no_path_leads_out(port: int, path: str) -> None:
    status, body, _ = ask(port, path)
    assert status in (400, 404), (path, status)
    assert b"hunter2" not in body
    assert b"root:" not in body


@pytest.mark.parametrize(
    "query",
    [
        "overview?run=1",
        "overview?run=-1",
        "overview?run=../..",
        "overview?run=99999999999999999999",
        "lanes?run=0&step=x",
        "lanes?run=0&step=1&ranks=../../etc",
        "lanes?run=0&step=1&ranks=0-99999999999",
        "sample?run=0&step=1&split=../../secret&id=4",
        "sample?run=0&step=1&split=train&id=1e9",
        "sample?run=0&step=%C2%B2&split=train&id=0",
    ],
)
def test_parameters_are_numbers_that_can_be(port: int, query: str) -> None:
    status, body, _ = ask(port, f"/api/{query}")
    assert status == 404, (query, status, body)
    assert "error" in json.loads(body)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nobody_may_write(port: int, method: str) -> None:
    for path in ("/", "/api/overview?run=0", "/main.js"):
        assert ask(port, path, method)[0] == 405


def test_other_pages_may_neither_read_nor_frame_it_and_scripts_are_its_own(port: int) -> None:
    for path in ("/", "/api/samples?run=0", "/main.js", "/nothing"):
        headers = ask(port, path, Origin="https://evil.example")[2]
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert "Access-Control-Allow-Origin" not in headers
        assert headers["X-Content-Type-Options"] == "nosniff"


def test_a_port_that_is_taken_is_named(port: int) -> None:
    with pytest.raises(ConfigError, match=f"--port {port}: .*give another one"):
        bind(port)


def test_without_a_port_a_taken_one_is_passed_over(port: int, tmp_path: Path) -> None:
    first, second = bind(None), bind(None)
    assert first.getsockname()[1] != second.getsockname()[1]
    first.close()
    second.close()


@pytest.mark.parametrize(
    "path",
    ["/", "/main.js", "/api/overview?run=0", f"/{TOKEN}", f"/{TOKEN}x/", "//", f"/%2f{TOKEN}/", f"/?token={TOKEN}"],
)
def test_other_users_who_do_not_know_the_address_see_nothing(port: int, path: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20 * load_factor())
    for method in ("GET", "HEAD", "POST"):
        connection.request(method, path)
        response = connection.getresponse()
        assert response.status == 403
        assert b"grpo" not in response.read()
        connection.close()


def test_the_address_that_is_printed_opens_the_page_and_no_two_are_alike(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=2, workers=1)
    seen = set()
    for _ in range(2):
        command = [sys.executable, "-m", "distflow", "show", str(run), "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as shown:
            assert shown.stdout is not None
            address = re.search(r"http://localhost:(\d+)(/\w{32}/) ", shown.stdout.readline())
            assert address
            connection = http.client.HTTPConnection("127.0.0.1", int(address[1]), timeout=20 * load_factor())
            connection.request("GET", address[2])
            assert connection.getresponse().status == 200
            seen.add(address[2])
            shown.kill()
    assert len(seen) == 2


def test_connections_that_say_nothing_keep_nobody_out(port: int) -> None:
    with ExitStack() as stack:
        for i in range(2 * MAX_CONNECTIONS):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            sock.sendall(b"GET / HTTP/1.1\r\nX: " if i % 2 else b"")
        assert ask(port, "/api/runs")[0] == 200

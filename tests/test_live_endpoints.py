"""Requests to a server's own port: what it answers, and each way in which it may not."""

import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
import time
from http.server import ThreadingHTTPServer

import pytest
from live_tree import _Handler, free_port

from memledger.live.endpoints import PATHS, Address, ask, ask_all, masked

SOON = 0.6


@contextlib.contextmanager
def server(pages, tls=None):
    http = ThreadingHTTPServer(("127.0.0.1", 0), type("H", (_Handler,), {"pages": pages}))
    if tls is not None:
        http.socket = tls.wrap_socket(http.socket, server_side=True)
    http.daemon_threads = True
    http.block_on_close = False
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield Address(http.server_address[1])
    finally:
        http.shutdown()
        http.server_close()


@contextlib.contextmanager
def raw(answer):
    """A socket that says the same bytes to everybody, whatever they ask."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def speak():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    with connection:
                        connection.recv(4096)
                        connection.sendall(answer)

        threading.Thread(target=speak, daemon=True).start()
        yield Address(listening.getsockname()[1])


def test_an_answer_is_decoded_cleaned_and_masked():
    with server(
        {"/server_info": {"body": {"version": "0.5.23", "api_key": "abcd1234abcd", "note": "a\x1b[31mb"}}}
    ) as at:
        got = ask(at, "/server_info")
    assert (got.status, got.problem) == (200, None)
    assert got.body == {"version": "0.5.23", "api_key": "***", "note": "ab"}


def test_a_server_that_never_answers_costs_no_more_than_the_deadline():
    pages = {path: {"how": "hang"} for path in PATHS["vllm"]}
    with server(pages) as at:
        started = time.perf_counter()
        answers = ask_all("vllm", at, SOON)
        took = time.perf_counter() - started
    assert {a.problem for a in answers} == {"no answer within 0.6 s: the server is busy or hangs"}
    assert took < 2 * SOON


def test_a_trickle_of_bytes_ends_at_the_deadline_as_well():
    with server({"/metrics": {"how": "drip"}}) as at:
        started = time.perf_counter()
        got = ask(at, "/metrics", SOON)
    assert got.problem == "no answer within 0.6 s: the server is busy or hangs"
    assert time.perf_counter() - started < 2 * SOON


def test_a_redirect_is_not_followed():
    with server({"/metrics": {"status": 307, "how": "redirect", "to": "http://example.org/metrics"}}) as at:
        got = ask(at, "/metrics")
    assert (got.status, got.body) == (307, None)
    assert got.problem == "redirects to http://example.org/metrics, which is not followed"


@pytest.mark.parametrize("how", ["huge", "announced"])
def test_a_page_of_50_mb_is_not_read(how):
    with server({"/metrics": {"how": how}}) as at:
        got = ask(at, "/metrics", 10)
    assert got.body is None
    assert got.problem == "the answer is longer than 8 MiB and was not read: this is no page of a server of this kind"


def test_a_binary_page_is_no_text():
    with server({"/metrics": {"how": "binary"}}) as at:
        assert (
            ask(at, "/metrics").problem
            == "the answer is not text (10,240 bytes): this is no page of a server of this kind"
        )


@pytest.mark.parametrize(
    ("path", "body", "problem"),
    [
        ("/version", "<html>", "the answer is not JSON"),
        ("/version", "[" * 100_000, "the answer is not JSON"),
        ("/metrics", "<html>hello</html>", "the answer is not a page of Prometheus metrics"),
    ],
)
def test_a_page_of_another_form(path, body, problem):
    with server({path: {"body": body}}) as at:
        assert ask(at, path).problem == problem


@pytest.mark.parametrize(
    "answer", [b"SSH-2.0-OpenSSH_9.2\r\n", b"\x15\x03\x01\x00\x02\x02\x50", b"HTTP/9 hello\r\n\r\n"]
)
def test_what_does_not_speak_http(answer):
    with raw(answer) as at:
        got = ask(at, "/version", SOON)
    assert got.problem == f"what listens on 127.0.0.1:{at.port} does not answer in HTTP"


def test_a_connection_that_breaks_off():
    with raw(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc") as at:
        got = ask(at, "/version", SOON)
    assert got.body is None
    assert got.problem


def test_nothing_listens():
    port = free_port()
    assert (
        ask(Address(port), "/version").problem
        == f"nothing answers on 127.0.0.1:{port}: the server is still starting, or it listens elsewhere"
    )


def test_the_key_is_sent_and_its_lack_names_the_option():
    with server({"/v1/models": {"key": "k-1", "body": {"data": []}}}) as at:
        assert ask(Address(at.port, key="k-1"), "/v1/models").body == {"data": []}
        assert (
            ask(at, "/v1/models").problem
            == "the server asks for its API key: name the variable that holds it with --api-key-env"
        )


@pytest.mark.skipif(not shutil.which("openssl"), reason="a certificate is made with openssl")
def test_a_server_that_speaks_tls_is_asked_so_and_its_certificates_name_does_not_matter(tmp_path):
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=example.org"]
    subprocess.run([*made, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with server({"/version": {"body": {"version": "1"}}, "/metrics": {"how": "drip"}}, context) as at:
        assert ask(Address(at.port, tls=True), "/version").body == {"version": "1"}
        assert (
            ask(Address(at.port, tls=True), "/metrics", SOON).problem
            == "no answer within 0.6 s: the server is busy or hangs"
        )
        # Plain HTTP gets an alert or a closed connection, whichever comes first.
        assert ask(at, "/version", SOON).problem.startswith(f"what listens on 127.0.0.1:{at.port} ")


def test_proxies_are_ignored(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with server({"/version": {"body": {"version": "1"}}}) as at:
        assert ask(at, "/version").body == {"version": "1"}


@pytest.mark.parametrize("host", ["10.0.0.1", "example.org", "0.0.0.0", "169.254.169.254", "::2"])
def test_nothing_but_loopback_is_asked(host):
    with pytest.raises(ValueError, match="not a loopback address"):
        ask(Address(80, host), "/metrics")


def test_sglang_before_0_5_8_answers_under_the_old_name_and_without_metrics_its_load():
    pages = {"/get_server_info": {"body": {"version": "0.4.9"}}, "/v1/loads": {"body": {"loads": []}}}
    with server(pages) as at:
        answers = {a.path: a for a in ask_all("sglang", at)}
    assert answers["/get_server_info"].body == {"version": "0.4.9"}
    assert answers["/v1/loads"].body == {"loads": []}
    assert answers["/metrics"].problem == "the server serves no metrics: start it with --enable-metrics to have them"


def test_nothing_that_changes_the_server_is_ever_asked():
    from memledger.live.endpoints import BRIEF, INSTEAD, PATHS

    paths = {p.partition("?")[0] for group in (*PATHS.values(), *BRIEF.values(), INSTEAD.values()) for p in group}
    assert paths == {"/server_info", "/get_server_info", "/metrics", "/v1/loads", "/v1/models", "/version"}


def test_values_of_secret_names_are_masked_wherever_they_stand():
    value = {
        "env": {"VLLM_API_KEY": "abc", "HF_TOKEN": "t", "num_tokens": 7},
        "keys": [{"api_key": ["a", "b"]}],
        "admin_api_key": None,
    }
    assert masked(value) == {
        "env": {"VLLM_API_KEY": "***", "HF_TOKEN": "***", "num_tokens": 7},
        "keys": [{"api_key": "***"}],
        "admin_api_key": None,
    }
    assert masked("--api-key sk-abcdefghijklmnopqrst") == "--api-key ***"


def test_an_answer_nested_without_end_is_cut():
    value = 1
    for _ in range(500):
        value = [value]
    assert "1" not in str(masked(value))

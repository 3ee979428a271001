"""Text from logs, made fit to be shown: nothing acts on a terminal, no secret is readable, harmless words stay."""

import time
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memledger.grammar import load_rules
from memledger.sanitize import SHOWN_LENGTH, clean, mask_secrets, strip_terminal

SECRET = "s3cr3t-V4lue_of-a-key"


@pytest.mark.parametrize(
    "text",
    [
        "--api-key {}",
        "--api-key={}",
        "--api-key '{}' --port 8000",
        '--api-key "{}"',
        "--admin-api-key {}",
        "--hf-token {}",
        "--token {}",
        "--ssl-keyfile-password {}",
        "HF_TOKEN={} vllm serve some/model",
        "HUGGING_FACE_HUB_TOKEN={}",
        "export OPENAI_API_KEY={}",
        "export OPENAI_API_KEY='{}'",
        "docker run -e HF_TOKEN={} image",
        'docker run --env "HF_TOKEN={}" image',
        "AWS_SECRET_ACCESS_KEY={}",
        "AWS_SESSION_TOKEN={}",
        "WANDB_API_KEY: {}",
        "ServerArgs(api_key='{}', host='x')",
        "ServerArgs(api_key=None, admin_api_key='{}')",
        "non-default args: {{'api_key': ['{}'], 'port': 8000}}",
        "non-default args: {{'api_key': ['one', '{}'], 'port': 8000}}",
        "Namespace(api_key=['{}'], port=8000)",
        '{{"api_key": "{}", "port": 8000}}',
        '{{\\"api_key\\": \\"{}\\", \\"port\\": 8000}}',
        '{{"token": "{}"}}',
        '{{"password": "{} with blanks"}}',
        "password: {}",
        "passwd={}",
        "client_secret={}",
        "Authorization: Bearer {}",
        "'authorization': 'Bearer {}'",
        "-H 'Authorization: Basic {}'",
        "X-Api-Key: {}",
        "curl -H 'Bearer {}'",
        "https://user:{}@host/path",
        "redis://:{}@host:6379",
        "https://host/path?token={}&x=1",
        "https://host/path?api_key={}&x=1",
        "https://bucket/x?X-Amz-Credential=a&X-Amz-Signature={}",
        "https://account/x?sv=1&sig={}",
        "ServerArgs(api_key=('{}',), host='x')",
        "ServerArgs(api_key=b'{}', host='x')",
        "credentials={{'a': '{}'}}",
        "argv: ['--api-key', '{}', '--tp', '2']",
        '["--api-key","{}"]',
        "--api-key the-first-of-several-keys {} --port 8000",
        "Cookie: session={}",
        "curl -u user:{} host",
        "https://{}@host/path",
    ],
)
def test_a_named_secret_is_masked(text: str) -> None:
    shown = clean(text.format(SECRET))
    assert SECRET not in shown
    assert not any(part in shown for part in (SECRET[:6], SECRET[-6:], "with blanks"))
    assert "***" in shown


@pytest.mark.parametrize("value", ["1234", "q", "local", "123456789"])
@pytest.mark.parametrize("text", ["--api-key {}", "password={}", "'api_key': '{}'"])
def test_short_and_numeric_values_of_a_secret_name_are_masked(text: str, value: str) -> None:
    assert clean(text.format(value)) == text.format(value).replace(f"'{value}'", "***").replace(value, "***")


@pytest.mark.parametrize(
    "secret",
    [
        "sk-" + "a1B2" * 8,
        "hf_" + "a1B2" * 8,
        "ghp_" + "a1B2" * 9,
        "github_pat_" + "a1B2" * 9,
        "glpat-" + "a1B2" * 5,
        "xoxb-" + "1234-" * 5,
        "nvapi-" + "a1B2" * 9,
        "AKIA" + "A1B2" * 4,
        "AIza" + "a1B2" * 9,
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcdefgh",
    ],
)
@pytest.mark.parametrize("text", ["{}", "loaded with {} from", "('{}',)", "x={}"])
def test_a_key_is_known_by_its_look(text: str, secret: str) -> None:
    assert secret[8:] not in clean(text.format(secret))


def test_a_private_key_is_masked_to_its_end() -> None:
    assert "MIIE" not in clean("-----BEGIN RSA PRIVATE KEY-----\nMIIE" + "a" * 100)


@pytest.mark.parametrize("length", [64, 70, 76])
@pytest.mark.parametrize("before", ["", "[rank0]: ", "2026-01-01T00:00:00Z stdout F "])
def test_the_lines_inside_a_private_key_are_masked_each_by_itself(length, before) -> None:
    body = ("MIIEvQIBADANBgkqhkiG9w0BAQEFAASC/KcwggSjAgEAAoIBAQC7VJTUt9Us8cKj" * 2)[:length]
    assert mask_secrets(f"{before}{body}") == f"{before}***"


@pytest.mark.parametrize(
    "text",
    [
        "sha256 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "x" * 64,
        "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC",
        "/models/Qwen3-Next-80B-A3B-Instruct/snapshots/0123456789abcdef/model.safetensors",
        "/hub/org/Name/snapshots/" + "0a" * 20,
        "/data/models/Meta/Llama33/70B/Instruct/Snapshots/x1/Weights/Part",
    ],
)
def test_digests_and_paths_are_no_key(text) -> None:
    assert mask_secrets(text) == text


def test_a_secret_that_is_cut_off_by_the_length_is_masked() -> None:
    shown = clean("x" * (SHOWN_LENGTH - 15) + " --api-key " + SECRET * 100)
    assert SECRET[:3] not in shown
    assert len(shown) <= SHOWN_LENGTH


@pytest.mark.parametrize(
    "text",
    [
        "max_total_num_tokens=330323, chunked_prefill_size=8192",
        "Decode batch, #running-req: 3, #token: 192896, token usage: 0.88",
        "#full token: 1470941, full token usage: 0.09, #swa token: 1470941, swa token usage: 0.10",
        "Prefill batch, #new-token: 43008, #cached-token: 123456, #pending-token: 109585",
        "tokenizer='some/model', tokenizer_path='some/model', skip_tokenizer_init=False",
        "eos_token='<|im_end|>', bos_token: '<s>', pad_token_id=151643, image_token=<image>",
        "max_num_batched_tokens=8192, num_speculative_tokens=3, max_tokens: 4096",
        "key_value_heads=8, num_key_value_heads: 8, key=layers.0.weight, cache_key: abcdefgh",
        "api_key=None, admin_api_key=None, token=None, use_auth_token=False",
        "token ids: 12345678, token: 12345678",
        "GPU KV cache size: 1,214,464 tokens, KV Cache is allocated. #tokens: 330323, K size: 10.08 GB",
        "ssl_keyfile=/etc/keys/server.pem, ssl_certfile='/etc/cert.pem'",
        "bearer of bad news: the basic allocator failed",
        "http://127.0.0.1:8000/v1 and tcp://10.0.0.1:29500",
        "model='sk-learn/model', hf_overrides={}, hf_config_path=None, pk_len=4",
        "--api-key --port 8000",
        "secrets of the trade",
        "new_token_ratio: 0.4000 -> 0.9000, #new_token_ratio: 0.1427",
        "keyboard interrupt",
    ],
)
def test_harmless_words_stay(text: str) -> None:
    assert clean(text) == text


def test_no_sample_of_the_bundled_rules_is_masked() -> None:
    """Figures that a rule reads must never be hidden by the mask."""
    lines = [(rule.full_id, sample.line) for rule in load_rules().rules for sample in rule.sample]
    hidden = [(rule, line) for rule, line in lines if mask_secrets(line) != line and "***" in mask_secrets(line)]
    assert [(rule, line) for rule, line in hidden if "api_key" not in line and "api-key" not in line] == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[1;36m(EngineCore pid=7)\x1b[0;0m INFO", "(EngineCore pid=7) INFO"),
        ("a\x1b[2Jb\x1b[Hc", "abc"),
        ("\x1b]0;new title\x07text", "text"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x9b31mred", "red"),
        ("plain", "plain"),
    ],
)
def test_terminal_sequences_are_taken_off(text: str, shown: str) -> None:
    assert strip_terminal(text) == shown
    assert clean(text) == shown


@pytest.mark.parametrize(
    "character",
    [
        "\x00",
        "\x07",
        "\x08",
        "\x1b",
        "\x7f",
        "\x85",
        "\u200b",
        "\u202e",
        "\u2066",
        "\u2028",
        "\ufeff",
        "\u061c",
        "\xad",
        "\U000e0041",
        "\ud800",
    ],
)
def test_characters_that_do_not_show_are_replaced(character: str) -> None:
    assert clean(f"a{character}b") in {"a\N{REPLACEMENT CHARACTER}b", "ab"}


def test_a_hidden_character_does_not_hide_a_secret() -> None:
    assert SECRET not in clean(f"--api-\u200bkey=x --api-key={SECRET}")


def test_text_of_other_scripts_stays() -> None:
    text = "模型 модель مدل █▎│ é \N{ROCKET} 2.50→2.56 GiB (Δ0.03)"
    assert clean(text) == text


def test_cleaned_text_is_one_line_of_limited_length() -> None:
    assert clean("one\ttwo\r\nthree\nfour  ") == "one two three four"
    assert len(clean("x" * 10_000)) == SHOWN_LENGTH
    assert clean("x" * 10_000).endswith("\N{HORIZONTAL ELLIPSIS}")
    assert clean("x" * 50, length=10) == "x" * 9 + "\N{HORIZONTAL ELLIPSIS}"


@pytest.mark.parametrize("start", ["", 'api_key="', "--api-key ", "Authorization: Bearer ", "http://", "api_key=("])
@pytest.mark.parametrize(
    "again", ["-", "a-", "_", "key-", "key=", "\\", '\\"', "(", "a:", "://", "--api-key a", " b", "sk-"]
)
def test_masking_takes_time_in_proportion_to_the_text(start: str, again: str) -> None:
    text = f"key {start}{again * 20_000}"[:20_000]
    started = time.perf_counter()
    mask_secrets(text)
    assert time.perf_counter() - started < 0.5


@given(st.text(max_size=300))
def test_nothing_that_acts_on_a_terminal_is_left(text: str) -> None:
    shown = clean(text)
    assert not any(unicodedata.category(c) in {"Cc", "Cs", "Zl", "Zp"} for c in shown)
    assert not set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200b\u200f").intersection(shown)


def test_masking_takes_linear_time() -> None:
    for piece in ("token=", "--api-key ", "a://b:", "api_key: '", '\\"token\\": \\"', "eyJ", "x-", "_key"):
        clean(piece * 20_000, length=100_000)

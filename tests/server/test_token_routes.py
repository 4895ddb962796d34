"""/tokenize, /detokenize, /tokenizer_info, /version and /load."""

from __future__ import annotations

import json

import pytest

import jaxserve
from jaxserve.tokenizer.chat import encode_chat
from tests.fakes import BOS, EOS, FakeTokenizer
from tests.server.running import CONFIG, RunningServer, raw_post, text_prompt

MESSAGES = [{"role": "user", "content": "ab the"}, {"role": "assistant", "content": "é"}]
PLAIN = FakeTokenizer()


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
@pytest.mark.parametrize("text", ["", "x", "ab the stop", "é🙂<eos>\n\n", "a" * 9000])
def test_tokenize_gives_the_ids_of_a_text(server, path, text):
    if len(text) > 8 * CONFIG.max_model_len:
        assert server.post(path, {"prompt": text})[0] == 400
        return
    status, answer = server.post(path, {"prompt": text})
    assert status == 200
    ids = PLAIN.encode(text)
    assert answer == {
        "count": len(ids), "max_model_len": CONFIG.max_model_len, "tokens": ids, "token_strs": None
    }


def test_tokenize_counts_beyond_the_context(server):
    assert server.post("/tokenize", {"prompt": text_prompt(300)})[1]["count"] == 300


def test_tokenize_gives_a_chat_as_the_model_gets_it(server):
    for generation_prompt in (True, False):
        ids = encode_chat(
            PLAIN, server.model.chat_template, MESSAGES, add_generation_prompt=generation_prompt
        )
        body = {"messages": MESSAGES, "add_generation_prompt": generation_prompt, "return_token_strs": True}
        _, answer = server.post("/tokenize", body)
        assert answer["tokens"] == ids
        assert answer["token_strs"] == [PLAIN.token_text(i) for i in ids]
    status, chat = server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1})
    assert status == 200
    assert chat["usage"]["prompt_tokens"] == server.post("/tokenize", {"messages": MESSAGES})[1]["count"]


def test_special_tokens_are_added_unless_told_otherwise():
    tokenizer = FakeTokenizer()
    tokenizer.add_bos = True
    with RunningServer(tokenizer=tokenizer) as running:
        assert running.post("/tokenize", {"prompt": "x"})[1]["tokens"] == [BOS, *PLAIN.encode("x")]
        assert running.post("/tokenize", {"prompt": ""})[1]["tokens"] == [BOS]
        plain = {"prompt": "x", "add_special_tokens": False}
        assert running.post("/tokenize", plain)[1]["tokens"] == PLAIN.encode("x")


def test_detokenize_is_the_way_back(server):
    for text in ("", "x", "ab the stop", "é🙂<eos>\n\n"):
        ids = server.post("/tokenize", {"prompt": text})[1]["tokens"]
        assert server.post("/detokenize", {"tokens": ids}) == (200, {"prompt": text})
        assert server.post("/v1/detokenize", {"tokens": ids})[1]["prompt"] == text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": ["x"]}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": False}, "add_generation_prompt"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [PLAIN.vocab_size]}, "tokens[0]"),
        ("/detokenize", {"tokens": [3, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
def test_what_can_not_be_understood_is_400_that_names_the_field(server, path, body, param):
    status, answer = server.post(path, body)
    assert status == 400
    assert answer["error"]["param"] == param


def test_an_unknown_model_is_404(server):
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": []})):
        status, answer = server.post(path, {**body, "model": "other"})
        assert status == 404
        assert answer["error"]["code"] == "model_not_found"


def test_tokenizer_info_tells_the_special_tokens_and_the_template(server):
    _, info = server.get("/tokenizer_info")
    assert info["bos_token"] == PLAIN.token_text(BOS)
    assert info["eos_token"] == PLAIN.token_text(EOS)
    assert info["chat_template"] == server.model.chat_template.source
    assert info["tokenizer_class"] == "FakeTokenizer"
    assert info["model_max_length"] == CONFIG.max_model_len


def test_the_version_is_that_of_the_package(server):
    assert server.get("/version") == (200, {"version": jaxserve.__version__})


def test_the_load_counts_running_and_waiting_requests(server):
    assert server.get("/load")[1]["server_load"] == 0
    server.runner.hold()
    connections = [server.connect() for _ in range(CONFIG.max_num_seqs + 2)]
    for connection in connections:
        connection.sendall(raw_post("/v1/completions", {"prompt": "x", "max_tokens": 2}))
    server.wait(lambda: server.get("/load")[1]["server_load"] == len(connections))
    for connection in connections:
        connection.close()
    server.runner.release()
    server.wait_idle()
    assert server.get("/load")[1] == {
        "server_load": 0, "num_requests_running": 0, "num_requests_waiting": 0, "kv_cache_usage": 0.0
    }


def test_routes_that_need_no_engine_say_so_while_the_model_loads():
    with RunningServer(attach=False) as running:
        assert running.get("/version")[0] == 200
        assert running.get("/openapi.json")[0] == 200
        for path in ("/load", "/tokenizer_info"):
            status, _, raw = running.request("GET", path)
            assert status == 503
            assert "loading" in json.loads(raw)["error"]["message"]
        assert running.post("/tokenize", {"prompt": "x"})[0] == 503
        running.attach()

"""The OpenAPI document: every route, as it is.

Version 3.0.3, because that is what the packaged Swagger UI can draw. Request bodies of `/v1` name only
what the distributor itself reads: everything else belongs to the engine behind it.
"""

from __future__ import annotations

from typing import Any

from app import __version__
from app.balancing import ENCODER_POLICIES, POLICIES
from app.http.endpoints import BESIDE_V1, OF_ONE_ENGINE, RESPONSES
from app.nodes import Breaker, Role, State

Schema = dict[str, Any]

_CLIENT: list[Schema] = [{"apiKey": []}, {"xApiKey": []}, {}]
_ADMIN: list[Schema] = [{"adminKey": []}, {}]
_READER: list[Schema] = [{"readerKey": []}, *_ADMIN]

_ERRORS = {
    "400": "A field or the body is wrong; `error.param` names the field.",
    "401": "No key, or a wrong one.",
    "403": "The key is of another kind, or none is configured that would do.",
    "404": "Not known here.",
    "413": "The body is too large.",
    "501": "Engines have this route, and in front of many of them it has no meaning.",
    "502": "An engine can't be reached, broke off, or refused.",
    "503": "No node can serve this, Redis is away, or the worker stops. Carries Retry-After.",
    "504": "An engine was too slow, or did not answer.",
}

_PAIR = "By pair, as `<prefill URL>|<decode URL>`."

_ANSWERED_BY_ENGINE = (
    "Forwarded byte for byte to a node that has the model. Statuses and bodies of the engine pass unchanged. "
    'A stream that breaks off ends with one `data: {"error": ...}` event. Fields that steer the engines\' cache '
    "transfer (`migration_request`, `kv_transfer_params`, `bootstrap_*`, ...) are refused."
)


def document() -> Schema:
    return {
        "openapi": "3.0.3",
        "info": {
            "title": "Evenhand",
            "version": __version__,
            "description": "One OpenAI-compatible endpoint in front of many LLM engines.",
        },
        "tags": [
            {"name": "OpenAI", "description": "What clients call."},
            {"name": "Nodes", "description": "Node management, as LMDeploy's proxy has it, and more."},
            {"name": "Links", "description": "LMDeploy's DistServe: links between prefill and decode nodes."},
            {"name": "Health", "description": "For load balancers, monitoring and people."},
        ],
        "paths": {
            "/v1/models": {"get": _list_models()},
            "/v1/models/{model}": {"get": _one_model()},
            "/v1/chat/completions": {"post": _forwarded("Chat completion", "chatCompletion")},
            "/v1/completions": {"post": _forwarded("Completion", "completion")},
            "/v1/{path}": {"post": _forwarded_other()},
            **{path: {"post": _beside_v1(path)} for path in BESIDE_V1},
            RESPONSES + "{response}": {"get": _not_served("getResponse"), "delete": _not_served("deleteResponse")},
            RESPONSES + "{response}/cancel": {"post": _not_served("cancelResponse")},
            **{path: {"post": _not_served(_name_of(path))} for path in OF_ONE_ENGINE},
            "/nodes/status": {"get": _nodes_status()},
            "/nodes/explain": {"get": _nodes_explain()},
            "/nodes/add": {"post": _nodes_add()},
            "/nodes/remove": {"post": _nodes_remove()},
            "/nodes/terminate": {"post": _nodes_terminate()},
            "/nodes/terminate_all": {"get": _nodes_terminate_all()},
            "/start_profile": {"post": _profile("Begin profiling on every node of every role", "startProfile")},
            "/stop_profile": {"post": _profile("End profiling on every node of every role", "stopProfile")},
            "/distserve/connection_warmup": {"post": _warm_up()},
            "/distserve/gc": {"post": _collect()},
            "/distserve/links": {"get": _links()},
            "/health": {"get": _health()},
            "/ready": {"get": _ready()},
            "/metrics": {"get": _metrics()},
            "/dashboard/state": {"get": _state()},
            "/dashboard/events": {"get": _events()},
            "/": {"get": _page()},
            "/openapi.json": {"get": _openapi()},
            "/dashboard": {"get": _dashboard()},
        },
        "components": {
            "schemas": _schemas(),
            "headers": {"RequestId": {"description": "The request's id, kept or made.", "schema": {"type": "string"}}},
            "securitySchemes": {
                "apiKey": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "One of --api-keys, where there are any.",
                },
                "xApiKey": {
                    "type": "apiKey",
                    "in": "header",
                    "name": "x-api-key",
                    "description": "The same key as Anthropic's clients send it; counts where Authorization "
                    "holds no right one.",
                },
                "adminKey": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "One of --admin-keys (or of --api-keys where there are none). "
                    "Not needed from --trusted-nodes.",
                },
                "readerKey": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "One of --reader-keys, which opens what changes nothing; an admin key does too.",
                },
            },
        },
    }


# --- building blocks --------------------------------------------------------------------------------


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def _answer(description: str, content: Schema | None = None) -> Schema:
    answer: Schema = {
        "description": description,
        "headers": {"X-Request-Id": {"$ref": "#/components/headers/RequestId"}},
    }
    return answer if content is None else {**answer, "content": content}


def _errors(*statuses: str) -> Schema:
    return {status: _answer(_ERRORS[status], _json(_ref("Error"))) for status in statuses}


def _literal(*texts: str) -> Schema:
    return _json({"type": "string", "enum": list(texts)})


def _operation(
    tag: str, summary: str, identifier: str, *, ok: Schema, errors: tuple[str, ...] = (), **more: Any
) -> Schema:
    responses = ok if "description" not in ok else {"200": ok}
    return {
        "tags": [tag],
        "summary": summary,
        "operationId": identifier,
        "responses": {**responses, **_errors(*errors)},
        **more,
    }


def _node_url() -> Schema:
    return {
        "type": "string",
        "format": "uri",
        "minLength": 1,
        "description": "http or https, host, perhaps port (1 to 65535) and path; no user, query or fragment.",
        "example": "http://10.0.0.5:23333",
    }


def _query(name: str, schema: Schema, description: str) -> Schema:
    return {"name": name, "in": "query", "required": False, "schema": schema, "description": description}


# --- OpenAI ---------------------------------------------------------------------------------------


def _list_models() -> Schema:
    return _operation(
        "OpenAI",
        "All models of all nodes, each once",
        "listModels",
        ok=_answer("The list; empty while there is no node.", _json(_ref("ModelList"))),
        errors=("401",),
        security=_CLIENT,
    )


def _one_model() -> Schema:
    return _operation(
        "OpenAI",
        "One model",
        "getModel",
        ok=_answer("The model.", _json(_ref("Model"))),
        errors=("401", "404"),
        security=_CLIENT,
        parameters=[
            {
                "name": "model",
                "in": "path",
                "required": True,
                "schema": {"type": "string", "minLength": 1},
                "description": "Its name; may hold slashes.",
            }
        ],
    )


def _forwarded(summary: str, identifier: str, request: str = "ModelRequest", **more: Any) -> Schema:
    content: Schema = {"application/json": {"schema": _ref(request)}}
    engine = {"application/json": {"schema": {}}, "text/event-stream": {"schema": {"type": "string"}}}
    operation = _operation(
        "OpenAI",
        summary,
        identifier,
        ok=_answer("The engine's answer, or its stream of events.", engine),
        errors=("400", "401", "404", "413", "502", "503", "504"),
        description=_ANSWERED_BY_ENGINE,
        security=_CLIENT,
        requestBody={"required": True, "content": content},
        **more,
    )
    operation["responses"]["default"] = {"description": "Any other answer of the engine, unchanged."}
    return operation


def _forwarded_other() -> Schema:
    operation = _forwarded(
        "Any other OpenAI call",
        "other",
        parameters=[
            {
                "name": "path",
                "in": "path",
                "required": True,
                "schema": {"type": "string", "minLength": 1},
                "description": "Everything after /v1/; may hold slashes. Not `models`.",
            }
        ],
    )
    operation["requestBody"]["content"]["multipart/form-data"] = _form()
    # `/v1/models`, `/v1/responses/{response}` and what is below them match this template too, and take no POST.
    operation["responses"]["405"] = _answer("`models` takes no POST.", _json(_ref("Error")))
    return operation


def _beside_v1(path: str) -> Schema:
    """A form can go there too, though no engine of today takes one."""
    operation = _forwarded(f"Forwarded to engines that have it: {BESIDE_V1[path]}", _name_of(path), "UnnamedRequest")
    operation["requestBody"]["content"]["multipart/form-data"] = _form()
    return operation


def _form() -> Schema:
    model = {"type": "string", "minLength": 1}
    return {"schema": {"type": "object", "required": ["model"], "properties": {"model": model}}}


def _not_served(identifier: str) -> Schema:
    response = {"name": "response", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    operation = _operation(
        "OpenAI",
        "Not served: it belongs to one engine of many",
        identifier,
        ok={},
        errors=("401", "501"),
        security=_CLIENT,
    )
    return operation if "Response" not in identifier else {**operation, "parameters": [response]}


def _name_of(path: str) -> str:
    """An operation's id: `/v2/embed` is `v2Embed`."""
    first, *rest = path.strip("/").replace("_", "/").split("/")
    return first + "".join(word.capitalize() for word in rest)


# --- nodes ------------------------------------------------------------------------------------------


def _nodes_status() -> Schema:
    return _operation(
        "Nodes",
        "Every node and how it stands, over all workers",
        "nodesStatus",
        ok=_answer("By node URL.", _json({"type": "object", "additionalProperties": _ref("NodeStatus")})),
        errors=("400", "401", "403", "503"),
        security=_READER,
        parameters=[_query("all", {"type": "boolean", "default": False}, "Show nodes that are gone, too.")],
    )


def _nodes_add() -> Schema:
    return _operation(
        "Nodes",
        "Register a node, or update it",
        "nodesAdd",
        ok=_answer("It is registered, and pending until its first good probe.", _literal("Added successfully")),
        errors=("400", "401", "403", "413", "503", "504"),
        description="With `status.models` the engine is not called: it may register before it listens. Without, it is "
        "asked for its models. An update never touches running counts; a role, speed or bootstrap port that is not "
        "given stays. A role that the deployment can't use (Prefill where every node does both, Hybrid where prefill "
        "and decode are separate) is refused with the reason.",
        security=_ADMIN,
        requestBody={"required": True, "content": _json(_ref("NodeRegistration"))},
    )


def _nodes_remove() -> Schema:
    drain = {"type": "boolean", "default": False}
    timeout = {"type": "number", "minimum": 0, "description": "Default: --grace-s."}
    return _operation(
        "Nodes",
        "Remove a node",
        "nodesRemove",
        ok=_answer(
            "It is removed or was not there, or it gets no new requests and is removed after its last one.",
            _literal("Deleted successfully", "Draining started"),
        ),
        errors=("400", "401", "403", "413", "503"),
        description="The URL is given in the body or as `node_url`.",
        security=_ADMIN,
        parameters=[
            _query("node_url", _node_url(), "The node; instead of `url` in the body."),
            _query("drain", drain, "Let running requests end first."),
            _query("timeout_s", timeout, "Seconds after which a drained node is removed in any case."),
        ],
        requestBody={
            "required": False,
            "content": _json(
                {
                    "type": "object",
                    "properties": {"url": _node_url(), "drain": drain, "timeout_s": timeout},
                }
            ),
        },
    )


def _nodes_terminate() -> Schema:
    return _operation(
        "Nodes",
        "Make an engine end itself, and remove it",
        "nodesTerminate",
        ok=_answer("The engine agreed.", _literal("Terminated successfully")),
        errors=("400", "401", "403", "404", "413", "502", "503", "504"),
        security=_ADMIN,
        requestBody={
            "required": True,
            "content": _json({"type": "object", "required": ["url"], "properties": {"url": _node_url()}}),
        },
    )


def _nodes_terminate_all() -> Schema:
    return _operation(
        "Nodes",
        "Make all engines end themselves, and remove them",
        "nodesTerminateAll",
        ok=_answer("All agreed.", _literal("All nodes terminated successfully")),
        errors=("401", "403", "502", "503"),
        security=_ADMIN,
    )


def _profile(summary: str, identifier: str) -> Schema:
    answers = {"type": "object", "additionalProperties": _ref("ProfileAnswer")}
    return _operation(
        "Nodes",
        summary,
        identifier,
        ok=_answer("By node URL. At least one node took it; a failure of another stands beside it.", _json(answers)),
        errors=("400", "401", "403", "413", "502", "503"),
        requestBody={
            "content": _json(
                {
                    "type": "object",
                    "description": "The engines' own options, such as SGLang's num_steps.",
                    "default": {},
                }
            )
        },
        description="The same call, with its body, to all nodes that are not gone, side by side.",
        security=_ADMIN,
    )


# --- links between LMDeploy's prefill and decode engines ----------------------------------------------

_UNLINKED = "400 where prefill and decode are not separate, or hand the cache over without links."


def _warm_up() -> Schema:
    return _operation(
        "Links",
        "Link every prefill node with every decode node of the same model",
        "warmUp",
        ok=_answer(
            "All pairs have been tried; `SUCCESS` is false where one failed, and each says why; "
            "also where there is none, and `reason` says why.",
            _json(
                _object(
                    ("SUCCESS", "links"),
                    SUCCESS={"type": "boolean"},
                    links={"type": "object", "additionalProperties": _ref("LinkResult"), "description": _PAIR},
                    reason={"type": "string", "description": "Where there is no pair: which role has no node."},
                )
            ),
        ),
        errors=("400", "401", "403", "503"),
        description="Links that stand are kept; a request needs no warm-up, it links by itself. Answered when "
        f"the last pair is linked or has failed (--link-timeout-s). {_UNLINKED}",
        security=_ADMIN,
    )


def _collect() -> Schema:
    sessions: Schema = {"type": "array", "items": _ref("Session")}
    return _operation(
        "Links",
        "Free caches that prefill nodes have kept for longer than --gc-age-s",
        "collect",
        ok=_answer(
            "What was freed, what could not be freed, and how many are under migration still.",
            _json(
                _object(
                    ("freed", "failed", "kept"),
                    freed=sessions,
                    failed=sessions,
                    kept={"type": "integer", "minimum": 0},
                )
            ),
        ),
        errors=("400", "401", "403", "503"),
        description=f"What a worker that died has left is freed without this. {_UNLINKED}",
        security=_ADMIN,
    )


def _links() -> Schema:
    return _operation(
        "Links",
        "Every link, and the counters of split serving, over all workers",
        "links",
        ok=_answer(
            "The table.",
            _json(
                _object(
                    ("links", "sessions", "counts"),
                    links={"type": "object", "additionalProperties": _ref("Link"), "description": _PAIR},
                    sessions={"type": "integer", "minimum": 0, "description": "Caches under migration now."},
                    counts={
                        "type": "object",
                        "additionalProperties": {"type": "integer", "minimum": 0},
                        "description": "links_made, links_failed, sessions_freed, sessions_lost, missing_params, "
                        "prefill_fallback: how often; no entry for never.",
                    },
                )
            ),
        ),
        errors=("400", "401", "403", "503"),
        description="400 where prefill and decode are not separate. Without links (--pd-protocol nixl, mooncake, "
        "sglang) the table is empty and the counters count.",
        security=_READER,
    )


# --- seeing it -------------------------------------------------------------------------------------

_OPEN_WITHOUT_KEYS = "Open to everybody while no keys are configured."


def _nodes_explain() -> Schema:
    return _operation(
        "Nodes",
        "What the next decision for a model would weigh",
        "nodesExplain",
        ok=_answer("The candidates as they stand now, and who is passed over.", _json(_ref("Explanation"))),
        errors=("400", "401", "403", "404"),
        description="Nothing is counted and no node is asked. While Redis is away by this worker's own counts. "
        f"{_OPEN_WITHOUT_KEYS}",
        security=_READER,
        parameters=[
            {
                "name": "model",
                "in": "query",
                "required": True,
                "schema": {"type": "string", "minLength": 1},
                "description": "As a request would name it.",
            }
        ],
    )


def _state() -> Schema:
    return _operation(
        "Health",
        "How the whole deployment stands",
        "state",
        ok=_answer("All nodes and workers with their counts.", _json(_ref("State"))),
        errors=("401", "403"),
        description="The same whichever worker answers; while Redis is away the last known nodes with this worker's "
        f"own counts. {_OPEN_WITHOUT_KEYS}",
        security=_READER,
    )


def _events() -> Schema:
    return _operation(
        "Health",
        "States and decisions as they come",
        "events",
        ok=_answer(
            "An endless stream. `event: state`, once a second: a State. `event: decisions`: an array of Decision, the "
            "oldest first.",
            {"text/event-stream": {"schema": {"type": "string"}}},
        ),
        errors=("401", "403", "503"),
        description="Decisions are shared while somebody looks, up to 5 requests a second of each worker. A viewer "
        "that is behind gets the newest state only. 503 where 50 look at this worker already, or where it stops. "
        f"{_OPEN_WITHOUT_KEYS}",
        security=_READER,
    )


# --- health and pages -------------------------------------------------------------------------------


def _metrics() -> Schema:
    return _operation(
        "Health",
        "Metrics for Prometheus",
        "metrics",
        ok=_answer("All figures, as docs/metrics.md lists them.", {"text/plain": {"schema": {"type": "string"}}}),
        errors=("401", "403"),
        security=_READER,
        description="Open to everybody while no keys are configured. The same whichever worker answers; what is "
        "shared comes from Redis and is left out while it is away.",
    )


def _health() -> Schema:
    states = {
        "type": "object",
        "properties": {state.value: {"type": "integer", "minimum": 1} for state in State},
        "additionalProperties": False,
        "description": "State -> how many nodes of the role are in it; no entry for none.",
    }
    body = _object(
        ("status",),
        status={"type": "string", "enum": ["healthy"]},
        roles={
            **_object(tuple(role.name for role in Role), **{role.name: states for role in Role}),
            "additionalProperties": False,
            "description": "With `detail` only, as this worker last read the registry.",
        },
    )
    return _operation(
        "Health",
        "Whether this process lives",
        "health",
        ok=_answer("It does.", _json(body)),
        security=[],
        parameters=[_query("detail", {"type": "string"}, "1 or true: how many nodes of each role are in which state.")],
    )


def _ready() -> Schema:
    body = {"type": "object", "required": ["status"], "properties": {"status": {"type": "string", "enum": ["ready"]}}}
    return _operation(
        "Health",
        "Whether it can serve: Redis reached, and a ready node of each role that is needed",
        "ready",
        ok=_answer("It can.", _json(body)),
        errors=("503",),
        security=[],
    )


def _page() -> Schema:
    content = {"text/html": {"schema": {"type": "string"}}}
    return _operation("Health", "This page", "page", ok=_answer("Swagger UI.", content), security=[])


def _openapi() -> Schema:
    return _operation(
        "Health", "This document", "openapi", ok=_answer("OpenAPI 3.0.3.", _json({"type": "object"})), security=[]
    )


def _dashboard() -> Schema:
    content = {"text/html": {"schema": {"type": "string"}}}
    return _operation(
        "Health",
        "The live page: nodes, workers, links and decisions as they are",
        "dashboard",
        ok=_answer(
            "The page. It holds no data; it asks for them, with a reader key or an admin key where there are keys.",
            content,
        ),
        security=[],
    )


# --- schemas ----------------------------------------------------------------------------------------


def _object(required: tuple[str, ...], **properties: Schema) -> Schema:
    needs = {"required": list(required)} if required else {}  # 3.0 takes no empty list
    return {"type": "object", **needs, "properties": properties}


def _schemas() -> Schema:
    text: Schema = {"type": "string"}
    perhaps_text: Schema = {"type": "string", "nullable": True}
    instant: Schema = {"type": "integer", "description": "Milliseconds since 1970."}
    models: Schema = {"type": "array", "items": {"type": "string", "minLength": 1}}
    roles = ", ".join(f"{role.value} {role.name}" for role in Role)
    return {
        "Error": _object(
            ("error",),
            error=_object(
                ("message", "type", "param", "code"), message=text, type=text, param=perhaps_text, code=perhaps_text
            ),
            error_code={
                "type": "integer",
                "enum": [10400, 10401, 10402],
                "description": "LMDeploy's code: unknown model, service unavailable, timeout.",
            },
            text={"type": "string", "description": "The message again, where LMDeploy's clients look for it."},
        ),
        "Model": _object(
            ("id", "object", "created", "owned_by", "root", "parent", "permission"),
            id=text,
            object={"type": "string", "enum": ["model"]},
            created={"type": "integer", "description": "Seconds since 1970, when its first node was registered."},
            owned_by=text,
            root=text,
            parent=perhaps_text,
            permission={"type": "array", "items": {"type": "object"}},
        ),
        "ModelList": _object(
            ("object", "data"),
            object={"type": "string", "enum": ["list"]},
            data={"type": "array", "items": _ref("Model")},
        ),
        "ModelRequest": _object(
            ("model",),
            model={"type": "string", "minLength": 1, "description": "Decides to which nodes the request may go."},
            stream={"description": "true for a stream of events; read by the engine."},
        ),
        "UnnamedRequest": _object(
            (),
            model={
                "type": "string",
                "nullable": True,
                "minLength": 1,
                "description": "May be left out where the deployment has one model only.",
            },
            stream={"description": "true for a stream of events; read by the engine."},
        ),
        "LinkResult": _object(
            ("state", "error"), state={"type": "string", "enum": ["connected", "failed"]}, error=perhaps_text
        ),
        "Link": _object(
            ("state", "owner", "since_ms", "took_ms", "error"),
            state={
                "type": "string",
                "enum": ["connecting", "connected", "failed", "undoing", "void"],
                "description": "void: of engines that have restarted since; the next request links them anew.",
            },
            owner={"type": "string", "description": "The worker that made it, or is at it."},
            since_ms=instant,
            took_ms={"type": "integer", "nullable": True, "description": "Milliseconds until it stood or failed."},
            error=perhaps_text,
        ),
        "Session": _object(("prefill", "session"), prefill=text, session={"type": "integer"}),
        "ProfileAnswer": _object(
            ("role", "status", "answer"),
            role={"type": "string", "enum": [role.name for role in Role]},
            status={"type": "integer", "nullable": True, "description": "The node's own; null: it can't be reached."},
            answer={"type": "string", "description": "What the node said, or why it can't be reached."},
        ),
        **_documents(),
        "NodeRegistration": _object(
            ("url",),
            url=_node_url(),
            status={
                **_object(
                    (),
                    role={
                        "oneOf": [{"type": "integer", "enum": [role.value for role in Role]}, {"type": "string"}],
                        "description": f"Number, or name in any case: {roles}.",
                    },
                    models=models,
                    speed={
                        "type": "number",
                        "description": "Greater than 0, any unit, the same for all nodes; -1 counts as not given.",
                    },
                    bootstrap_port={
                        "type": "integer",
                        "minimum": 1,
                        "maximum": 65535,
                        "nullable": True,
                        "description": "mooncake, sglang: of a prefill node's bootstrap server; else --bootstrap-port.",
                    },
                    host_header={
                        "type": "string",
                        "nullable": True,
                        "description": "HOST or HOST:PORT that the node is sent as Host instead of its URL's, and for "
                        "https the name that its certificate must have. Empty: the URL's again.",
                    },
                ),
                "nullable": True,
            },
            key={"type": "string", "description": "The key sent to this engine; never shown again."},
        ),
        "NodeStatus": _object(
            ("role", "models", "unfinished", "latency", "speed", "state"),
            role={"type": "integer", "enum": [role.value for role in Role], "description": roles},
            models=models,
            unfinished={"type": "integer", "description": "Requests dispatched and not finished, all workers."},
            latency={
                "type": "array",
                "items": {"type": "number"},
                "maxItems": 15,
                "description": "The last successful latencies, seconds, newest first.",
            },
            speed={"type": "number", "nullable": True},
            state={"type": "string", "enum": [state.value for state in State]},
            reason={"type": "string", "description": "Why it is in this state."},
            role_name={"type": "string", "enum": [role.name for role in Role]},
            bootstrap_port={"type": "integer", "nullable": True, "description": "null: --bootstrap-port."},
            host_header={"type": "string", "nullable": True, "description": "null: that of the URL."},
            source={
                "type": "string",
                "nullable": True,
                "description": "The --discover that it comes from; null: registered by a call or a setting.",
            },
            stages={
                "type": "object",
                "additionalProperties": _object(
                    ("mean_s", "count"), mean_s={"type": "number"}, count={"type": "integer", "minimum": 1}
                ),
                "description": "What requests that are split took at this node: link, prefill, handover, decode (to "
                "its first token). Seconds, the mean over all workers, and how many there were.",
            },
            static={"type": "boolean", "description": "Named by a setting such as --nodes: never forgotten."},
            registered_at_ms=instant,
            state_since_ms=instant,
            drain_until_ms={**instant, "nullable": True},
        ),
    }


def _documents() -> Schema:
    """Those of docs/decisions/0022-seeing-it.md: no field is ever left out."""

    def whole(**properties: Schema) -> Schema:
        return _object(tuple(properties), **properties)

    def perhaps(schema: Schema) -> Schema:
        return {**schema, "nullable": True}

    def listed(schema: Schema) -> Schema:
        return {"type": "array", "items": schema}

    text: Schema = {"type": "string"}
    count: Schema = {"type": "integer", "minimum": 0}
    seconds: Schema = {"type": "number", "minimum": 0, "description": "Seconds."}
    instant: Schema = {"type": "number", "description": "Seconds since 1970, by Redis's clock."}
    speed: Schema = {"type": "number", "description": "As used: the average of the others where none is given."}
    given_speed: Schema = {"type": "number", "nullable": True}
    score: Schema = {
        "type": "number",
        "nullable": True,
        "description": "What the strategy compares, less is better; null where it compares nothing.",
    }
    ratio: Schema = {"type": "number", "minimum": 0, "maximum": 1}
    role: Schema = {"type": "string", "enum": [role.name for role in Role]}
    stage: Schema = {"type": "string", "enum": ["request", "prefill", "decode", "encode"]}
    # An enum must name null too.
    strategies: Schema = {"type": "string", "enum": [*sorted(POLICIES), None], "nullable": True}
    seen = whole(node=text, score=score, unfinished=count, speed=speed, mean_latency_s=perhaps(seconds))
    return {
        "State": whole(
            time=instant,
            version=text,
            strategy=strategies,
            encoder_policy={"type": "string", "enum": [*sorted(ENCODER_POLICIES), None], "nullable": True},
            serving={"type": "string", "enum": ["Hybrid", "DistServe", None], "nullable": True},
            grace_s={**perhaps(seconds), "description": "How long a drain waits, where it is not told."},
            redis=whole(up={"type": "boolean"}, reason=perhaps(text)),
            registry_version=count,
            models=listed(text),
            aliases={
                "type": "object",
                "additionalProperties": text,
                "description": "Other names of these models: alias -> model.",
            },
            nodes=listed(
                whole(
                    url=text,
                    role=role,
                    state={"type": "string", "enum": [state.value for state in State]},
                    reason=text,
                    breaker={"type": "string", "enum": [breaker.value for breaker in Breaker]},
                    models=listed(text),
                    speed=given_speed,
                    unfinished=count,
                    failures={**count, "description": "In a row."},
                    latency_s={**listed(seconds), "maxItems": 15, "description": "The oldest first."},
                    requests={**count, "description": "Given to it in the last minute, retries too."},
                    share={**ratio, "description": "Of what was given to its role in the last minute."},
                    source={**perhaps(text), "description": "The `--discover` that lists it."},
                )
            ),
            workers=listed(
                whole(
                    id=text,
                    lease_s={**seconds, "description": "Left of its lease."},
                    unfinished=count,
                    nodes={"type": "object", "additionalProperties": count},
                )
            ),
            encoders=whole(
                cursor=count,
                next={**perhaps(text), "description": "Who gets the next media item; null: that depends on its model."},
                urls={**listed(text), "description": "Those that are ready, in the order of the round."},
            ),
            links=listed(whole(prefill=text, decode=text, state=text)),
            sessions={**count, "description": "Caches under migration now."},
            handovers={"type": "object", "additionalProperties": count},
        ),
        "Decision": whole(
            id={**text, "description": "Rises with time."},
            time=instant,
            request={**text, "description": "X-Request-Id."},
            worker=text,
            model=text,
            path=text,
            outcome=text,
            status=perhaps({"type": "integer"}),
            seconds=seconds,
            first_byte_s=perhaps(seconds),
            node={**text, "description": "The last one."},
            tries=listed(
                whole(
                    node=text,
                    stage=stage,
                    score=score,
                    candidates={**listed(seen), "maxItems": 16},
                    left_off={**count, "description": "Candidates beyond those."},
                )
            ),
            legs=listed(
                whole(node=text, stage=stage, status=perhaps({"type": "integer"}), seconds=seconds, error=perhaps(text))
            ),
        ),
        "Explanation": whole(
            alias={**perhaps(text), "description": "The name that was asked for, where it is an alias of the model."},
            model=text,
            strategy=strategies,
            redis=whole(up={"type": "boolean"}, reason=perhaps(text)),
            rule={**text, "description": "What the strategy does, in words."},
            choices=listed(
                whole(
                    roles=listed(role),
                    candidates=listed(
                        whole(
                            node=text,
                            role=role,
                            score=score,
                            chance={**ratio, "description": "Of being chosen next."},
                            unfinished=count,
                            speed=speed,
                            given_speed=given_speed,
                            mean_latency_s=perhaps(seconds),
                        )
                    ),
                    passed_over=listed(whole(node=text, why=text)),
                )
            ),
        ),
    }

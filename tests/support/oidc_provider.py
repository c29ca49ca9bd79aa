"""A small OpenID provider for tests, in a process of its own: ``python -m tests.support.oidc_provider PORT``.

Discovery, authorize, token, jwks, userinfo; codes are good once, PKCE (S256) and the client's secret are checked, id
tokens are signed (RS256). Who signs in stands in the parameter ``person`` of ``/authorize``, as JSON of their claims;
``cheat`` names what a broken or malicious provider would do.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import sys
import time
from typing import Any

import jwt
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import rsa

CLIENT_ID, CLIENT_SECRET = "fairlane", "a secret of the client"
KEY, OTHER_KEY = (rsa.generate_private_key(public_exponent=65_537, key_size=2_048) for _ in range(2))
codes: dict[str, dict[str, Any]] = {}
tokens: dict[str, dict[str, Any]] = {}


def issuer(request: web.Request) -> str:
    return f"http://{request.host}"


async def discovery(request: web.Request) -> web.Response:
    here = issuer(request)
    return web.json_response(
        {
            "issuer": here,
            "authorization_endpoint": f"{here}/authorize",
            "token_endpoint": f"{here}/token",
            "userinfo_endpoint": f"{here}/userinfo",
            "jwks_uri": f"{here}/jwks",
            "token_endpoint_auth_methods_supported": ["client_secret_basic", "client_secret_post"],
            "code_challenge_methods_supported": ["S256"],
        }
    )


async def jwks(request: web.Request) -> web.Response:
    key = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(KEY.public_key()))
    return web.json_response({"keys": [{**key, "kid": "1", "alg": "RS256", "use": "sig"}]})


async def authorize(request: web.Request) -> web.Response:
    asked = request.query
    if asked["client_id"] != CLIENT_ID or asked["response_type"] != "code" or asked["code_challenge_method"] != "S256":
        raise web.HTTPBadRequest(text="not a request of ours")
    if asked.get("cheat") == "cancelled":
        raise web.HTTPFound(f"{asked['redirect_uri']}?error=access_denied&state={asked['state']}")
    code = secrets.token_urlsafe(16)
    codes[code] = {**asked, "person": json.loads(asked["person"]), "cheat": asked.get("cheat", "")}
    raise web.HTTPFound(f"{asked['redirect_uri']}?code={code}&state={asked['state']}")


def _is_client(request: web.Request, form: Any) -> bool:
    header = request.headers.get("authorization", "")
    if header.startswith("Basic "):
        given = base64.b64decode(header.removeprefix("Basic ")).decode().split(":", 1)
    else:
        given = [str(form.get("client_id")), str(form.get("client_secret"))]
    return given == [CLIENT_ID, CLIENT_SECRET]


async def token(request: web.Request) -> web.Response:
    form = await request.post()
    grant = codes.pop(str(form.get("code")), None)
    verifier = str(form.get("code_verifier", "")).encode()
    challenge = base64.urlsafe_b64encode(hashlib.sha256(verifier).digest()).decode().rstrip("=")
    is_good = grant is not None and grant["code_challenge"] == challenge
    if not is_good or grant is None or form.get("redirect_uri") != grant["redirect_uri"]:
        return web.json_response({"error": "invalid_grant"}, status=400)
    if not _is_client(request, form):
        return web.json_response({"error": "invalid_client"}, status=401)
    cheat, now = grant["cheat"], int(time.time())
    access = secrets.token_urlsafe(16)
    tokens[access] = {**grant["person"], **({"sub": "somebody else"} if cheat == "other_subject" else {})}
    claims = {
        "iss": "http://elsewhere" if cheat == "issuer" else issuer(request),
        "aud": "another client" if cheat == "audience" else CLIENT_ID,
        "iat": now,
        "exp": now - 60 if cheat == "expired" else now + 300,
        **({} if cheat == "no_nonce" else {"nonce": "0" * 64 if cheat == "nonce" else grant.get("nonce", "")}),
        **grant["person"],
    }
    signed = jwt.encode(claims, OTHER_KEY if cheat == "key" else KEY, algorithm="RS256", headers={"kid": "1"})
    answer = {"access_token": access, "token_type": "Bearer", "expires_in": 300, "id_token": signed}
    return web.json_response({k: v for k, v in answer.items() if not (cheat == "no_id_token" and k == "id_token")})


async def userinfo(request: web.Request) -> web.Response:
    person = tokens.get(request.headers.get("authorization", "").removeprefix("Bearer "))
    return web.json_response(person) if person else web.json_response({"error": "invalid_token"}, status=401)


def main() -> None:
    app = web.Application()
    app.router.add_get("/.well-known/openid-configuration", discovery)
    app.router.add_get("/jwks", jwks)
    app.router.add_get("/authorize", authorize)
    app.router.add_post("/token", token)
    app.router.add_get("/userinfo", userinfo)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)


if __name__ == "__main__":
    main()

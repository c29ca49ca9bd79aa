"""Use cases of the second factor: enrol, give a code, codes for a lost phone, reset.

Failures slow down further ones as those of passwords do, on a count of their own: a right password does not clear it.
"""

from __future__ import annotations

import secrets
import string

from django.conf import settings

from controlplane.accounts import throttle, totp
from controlplane.accounts.actions import drop_second_factor, record_about
from controlplane.accounts.models import Role, User
from controlplane.common.access import visible
from controlplane.common.actor import Actor, Scope
from controlplane.common.errors import Conflict, Invalid, NotAllowed
from controlplane.common.secrets import digests
from controlplane.common.use_case import use_case
from controlplane.common.validation import lock_version

N_RECOVERY_CODES = 10
_ALPHABET = "".join(sorted(set(string.ascii_lowercase + string.digits) - set("il1o0u")))


def must_have(user: User) -> bool:
    """Who may change the platform needs a second factor, except where the site runs without TLS."""
    return bool(settings.SECOND_FACTOR_REQUIRED and user.role in (Role.OWNER, Role.OPERATOR))


def _plain(text: str) -> str:
    return "".join(c for c in text.lower() if c.isalnum() and c.isascii())


def _recovery_digests(user: User, text: str) -> dict[int, str]:
    """By version of the pepper, ``VERSION:HEX``: they have no column of their own for it."""
    return {version: f"{version}:{made}" for version, made in digests(f"{user.id}:{_plain(text)}").items()}


def _recovery_code() -> str:
    """Three groups of five characters without look-alikes: 73 bits."""
    return "-".join("".join(secrets.choice(_ALPHABET) for _ in range(5)) for _ in range(3))


def _own(actor: Actor, user: User) -> User:
    if actor.kind != "user" or actor.id != user.id:
        raise NotAllowed("a second factor is changed by its owner only")
    return User.objects.select_for_update().get(pk=user.pk)


@use_case(scope=None)
def enrol(*, actor: Actor, user: User, secret: bytes, code: str) -> list[str]:
    """Keep the secret once a code proves that the person's device has it; that code is used up by it.

    Returns the recovery codes, which are shown this once; each opens the account once in place of a code.

    Raises:
        Invalid: the code is wrong. Conflict: there is a second factor.
    """
    user = _own(actor, user)
    if user.totp_secret is not None:
        raise Conflict("the account has a second factor already")
    step = totp.matching_step(secret, _plain(code), after=0)
    if step is None:
        raise Invalid({"code": "is not the present code of this secret; does the device show the right time?"})
    codes = [_recovery_code() for _ in range(N_RECOVERY_CODES)]
    user.totp_secret, user.totp_step = totp.sealed(secret, user.id), step
    user.recovery_digests = [_recovery_digests(user, text)[settings.KEY_PEPPER_VERSION] for text in codes]
    user.version += 1
    user.save()
    record_about(actor, "user.second_factor_enrolled", user)
    return codes


def give_code(*, user: User, code: str, address: str) -> bool:
    """Whether the code, or a recovery code, is right; each is taken once.

    Raises:
        TooManyAttempts
    """
    account = f"{user.email}#code"
    throttle.check(email=account, address=address)
    if _take(actor=user.actor, user_id=user.id, code=_plain(code)):
        throttle.succeeded(email=account, address=address)
        return True
    throttle.failed(email=account, address=address)
    return False


@use_case(scope=None)
def _take(*, actor: Actor, user_id: str, code: str) -> bool:
    user = User.objects.select_for_update().get(pk=user_id)
    if user.totp_secret is None:
        return False
    secret = totp.opened(user.totp_secret, user.id)
    step = totp.matching_step(secret, code, after=user.totp_step) if secret is not None else None
    if step is not None:
        user.totp_step = step
        user.save(update_fields=["totp_step"])
        return True
    left = set(user.recovery_digests) - set(_recovery_digests(user, code).values())
    if len(left) == len(user.recovery_digests):
        return False
    user.recovery_digests = [each for each in user.recovery_digests if each in left]
    user.save(update_fields=["recovery_digests"])
    record_about(actor, "user.recovery_code_used", user, after={"left": len(user.recovery_digests)})
    return True


@use_case(scope=Scope.MEMBERS)
def reset_second_factor(*, actor: Actor, user_id: str, expected_version: int | None = None) -> User:
    """Take a lost device out of an account, whose holder then enrols another; who has none is left alone."""
    user = lock_version(visible(User.objects.all(), actor=actor), "member", user_id, expected_version)
    if user.totp_secret is not None:
        drop_second_factor(actor=actor, user=user)
    return user

"""REST does everything that the console does: each of its changing addresses has an operation with the same effect."""

from __future__ import annotations

from tests.integration.controlplane.test_audited_routes import CASES
from tests.integration.controlplane.test_rest import MUTATIONS

SAME: dict[str, tuple[str, str]] = {
    "tenant_new": ("POST", "/tenants"),
    "tenants_bulk": ("POST", "/tenants/bulk"),
    "tenant": ("PATCH", "/tenants/{id}"),
    "tenant_state": ("POST", "/tenants/{id}/suspend"),
    "tenant_stop": ("POST", "/tenants/{id}/stop"),
    "tenant_resume": ("POST", "/tenants/{id}/resume"),
    "tenant_delete": ("DELETE", "/tenants/{id}"),
    "key_new": ("POST", "/keys"),
    "key": ("PATCH", "/keys/{id}"),
    "key_revoke": ("POST", "/keys/{id}/revoke"),
    "group_new": ("POST", "/groups"),
    "group": ("PATCH", "/groups/{id}"),
    "group_delete": ("DELETE", "/groups/{id}"),
    "tier_new": ("POST", "/tiers"),
    "tier": ("PATCH", "/tiers/{id}"),
    "tier_delete": ("DELETE", "/tiers/{id}"),
    "price_list_new": ("POST", "/price-lists"),
    "price_list": ("PATCH", "/price-lists/{id}"),
    "price_list_assign": ("PUT", "/tenants/{tenant_id}/price-list"),
    "price_list_delete": ("DELETE", "/price-lists/{id}"),
    "pool_new": ("POST", "/pools"),
    "pool": ("PATCH", "/pools/{id}"),
    "pool_stop_grammars": ("POST", "/pools/{id}/stop-grammars"),
    "pool_allow_grammars": ("POST", "/pools/{id}/allow-grammars"),
    "backend_new": ("POST", "/backends"),
    "backend": ("PATCH", "/backends/{id}"),
    "backend_drain": ("POST", "/backends/{id}/drain"),
    "backend_uncordon": ("POST", "/backends/{id}/uncordon"),
    "backend_delete": ("DELETE", "/backends/{id}"),
    "request_cancel": ("POST", "/requests/{request_id}/cancel"),
    "hazard_resolve": ("POST", "/hazards/{id}/resolve"),
    "predictor_start": ("POST", "/training-jobs"),
    "predictor_promote": ("POST", "/promotions"),
    "predictor_roll_back": ("POST", "/promotions/roll-back"),
    "predictor_demote": ("POST", "/promotions/demote"),
    "predictor_cancel": ("POST", "/training-jobs/{id}/cancel"),
    "job_start": ("POST", "/jobs"),
    "job_cancel": ("POST", "/jobs/{id}/cancel"),
    "job_retry": ("POST", "/jobs/{id}/retry"),
    "members": ("POST", "/invitations"),
    "member": ("PATCH", "/members/{id}"),
    "member_password": ("POST", "/members/{id}/reset-password"),
    "member_second_factor": ("POST", "/members/{id}/reset-second-factor"),
    "member_remove": ("DELETE", "/members/{id}"),
    "invitation_revoke": ("POST", "/invitations/{id}/revoke"),
    "tokens": ("POST", "/tokens"),
    "token_revoke": ("POST", "/tokens/{id}/revoke"),
}
ONLY_IN_A_BROWSER = {
    "sign_in": "opens a session; programs have tokens",
    "sign_in_code": "opens a session",
    "sign_out": "ends a session",
    "second_factor": "enrols the device of who is signed in; a token must not",
    "password": "is changed by who is signed in and knows the present one; a token must not",
    "invitation": "the one who is invited has no account yet, nor a token",
}


def test_each_has_its_operation_or_a_reason_to_have_none() -> None:
    assert not SAME.keys() & ONLY_IN_A_BROWSER.keys()
    assert SAME.keys() | ONLY_IN_A_BROWSER.keys() == CASES.keys()


def test_the_operation_leaves_the_same_audit_entry() -> None:
    assert {name: MUTATIONS[each][1] for name, each in SAME.items()} == {name: CASES[name].action for name in SAME}

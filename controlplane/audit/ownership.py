"""The role that owns the audit log, so that the one the program runs as cannot take its triggers away.

Whoever owns a table may disable its triggers. So the log belongs to a role of its own that nobody signs in as, and the
program's role may read and append. All else belongs to the program's role, which makes partitions as days go by.
"""

from __future__ import annotations

from django.db.backends.utils import CursorWrapper
from psycopg import sql

OWNER = "fairlane_audit"
TABLES = ("audit_auditentry", "audit_audithead")
FUNCTION = "audit_refuse_change"

# Sequences that belong to a column follow their table by themselves.
_FOREIGN = """
    SELECT CASE c.relkind WHEN 'S' THEN 'SEQUENCE' WHEN 'v' THEN 'VIEW' ELSE 'TABLE' END, c.relname
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = current_schema() AND c.relkind IN ('r', 'p', 'v', 'S') AND c.relname <> ALL(%(kept)s)
      AND c.relowner <> %(role)s::regrole
      AND NOT EXISTS (SELECT FROM pg_depend d
                      WHERE d.classid = 'pg_class'::regclass AND d.objid = c.oid AND d.deptype IN ('a', 'i', 'e')
                        AND (c.relkind = 'S' OR d.deptype = 'e'))
    ORDER BY 2
"""
_FOREIGN_FUNCTIONS = """
    SELECT p.oid::regprocedure::text, p.proname FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
    WHERE n.nspname = current_schema() AND p.proowner <> %(role)s::regrole AND p.proname <> %(kept)s
      AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.objid = p.oid AND d.deptype = 'e')
"""


def separate(cursor: CursorWrapper, *, application: str, owner: str = OWNER) -> None:
    """Give the audit log to ``owner`` and all else of the schema to ``application``; both are made if need be.

    For a superuser, or a role that may create roles and is a member of both. To be repeated after migrations: what
    they made belongs to who ran them. What is right already is not touched. Runs in the caller's transaction.
    """
    cursor.execute("SELECT rolname FROM pg_roles WHERE rolname = ANY(%s)", [[application, owner]])
    known = {name for (name,) in cursor.fetchall()}
    for role, how in ((application, "LOGIN"), (owner, "NOLOGIN")):
        if role not in known:
            cursor.execute(sql.SQL("CREATE ROLE {} " + how).format(sql.Identifier(role)))
    cursor.execute("SELECT rolsuper, pg_has_role(%s, 'MEMBER') FROM pg_roles WHERE rolname = current_user", [owner])
    is_super, is_member = cursor.fetchone()
    if not is_super and not is_member:
        cursor.execute(sql.SQL("GRANT {} TO CURRENT_USER").format(sql.Identifier(owner)))
    named = {"application": sql.Identifier(application), "owner": sql.Identifier(owner)}
    cursor.execute("SELECT current_schema()")
    named["schema"] = sql.Identifier(cursor.fetchone()[0])
    cursor.execute(sql.SQL("GRANT USAGE, CREATE ON SCHEMA {schema} TO {application}, {owner}").format(**named))
    cursor.execute(_FOREIGN, {"kept": list(TABLES), "role": application})
    for kind, name in cursor.fetchall():
        cursor.execute(
            sql.SQL("ALTER " + kind + " {name} OWNER TO {application}").format(name=sql.Identifier(name), **named)
        )
    cursor.execute(_FOREIGN_FUNCTIONS, {"kept": FUNCTION, "role": application})
    for signature, _ in cursor.fetchall():
        # The signature is PostgreSQL's own text, quoted where it must be.
        cursor.execute(sql.SQL("ALTER FUNCTION " + signature + " OWNER TO {application}").format(**named))
    cursor.execute(
        "SELECT relname FROM pg_class WHERE relname = ANY(%s) AND relnamespace = current_schema()::regnamespace"
        " AND relowner <> %s::regrole",
        [list(TABLES), owner],
    )
    for (name,) in cursor.fetchall():
        table = {"table": sql.Identifier(name), "sequence": sql.Identifier(f"{name}_id_seq"), **named}
        cursor.execute(sql.SQL("ALTER TABLE {table} OWNER TO {owner}").format(**table))
        cursor.execute(sql.SQL("REVOKE ALL ON {table} FROM {application}").format(**table))
        cursor.execute(sql.SQL("GRANT SELECT, INSERT ON {table} TO {application}").format(**table))
        cursor.execute(sql.SQL("GRANT USAGE, SELECT ON SEQUENCE {sequence} TO {application}").format(**table))
    cursor.execute(sql.SQL("ALTER FUNCTION " + FUNCTION + " OWNER TO {owner}").format(**named))
    cursor.execute(sql.SQL("REVOKE CREATE ON SCHEMA {schema} FROM {owner}").format(**named))


def set_password(cursor: CursorWrapper, role: str, password: str) -> None:
    """Give a role its password, hashed here: the text itself must not stand in a log of statements."""
    hashed = cursor.connection.pgconn.encrypt_password(password.encode(), role.encode(), b"scram-sha-256").decode()
    cursor.execute(sql.SQL("ALTER ROLE {} PASSWORD {}").format(sql.Identifier(role), sql.Literal(hashed)))


def weakness(cursor: CursorWrapper) -> str:
    """Why the role of this connection could tamper with the audit log; "" if it could not."""
    cursor.execute(
        "SELECT c.relname, current_user, r.rolsuper, pg_has_role(c.relowner, 'MEMBER'),"
        " has_table_privilege(c.oid, 'UPDATE, DELETE, TRUNCATE, TRIGGER')"
        " FROM pg_class c, pg_roles r WHERE c.relname = ANY(%s) AND c.relnamespace = current_schema()::regnamespace"
        " AND r.rolname = current_user ORDER BY 1",
        [list(TABLES)],
    )
    rows = cursor.fetchall()
    if len(rows) < len(TABLES):
        return "it is not there yet: run the migrations"
    for name, role, is_super, is_owner, may_change in rows:
        if is_super:
            return f"the role {role} is a superuser"
        if is_owner:
            return f"the role {role} owns the table {name}, or may act as its owner"
        if may_change:
            return f"the role {role} may change the table {name}"
    return ""

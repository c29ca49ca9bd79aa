"""Django settings of the control plane, derived from ``environment.Environment``."""

from __future__ import annotations

import structlog
from structlog.typing import Processor

from controlplane.environment import read_environment

ENVIRONMENT = read_environment()

SECRET_KEY = ENVIRONMENT.secret()
DEBUG = False
ALLOWED_HOSTS = ENVIRONMENT.hosts()
CSRF_TRUSTED_ORIGINS = [o.strip() for o in ENVIRONMENT.trusted_origins.split(",") if o.strip()]

IS_HTTPS = not ENVIRONMENT.insecure_http
SECOND_FACTOR_REQUIRED = IS_HTTPS
"""Of owners and operators."""
KEY_PEPPERS = ENVIRONMENT.peppers()
KEY_PEPPER_VERSION = ENVIRONMENT.pepper_version()
REDIS_URL = ENVIRONMENT.redis_url
DB_APPLICATION_ROLE = ENVIRONMENT.db_application_role
DB_APPLICATION_PASSWORD = ENVIRONMENT.application_password()

INSTALLED_APPS = [
    # Before the admin app, whose frame it replaces.
    "controlplane.staff",
    "django.contrib.admin.apps.SimpleAdminConfig",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django.contrib.humanize",
    "django.contrib.postgres",
    "rest_framework",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "django_htmx",
    "allauth",
    "allauth.account",
    "allauth.socialaccount",
    "allauth.socialaccount.providers.openid_connect",
    "controlplane.common",
    "controlplane.audit",
    "controlplane.accounts",
    "controlplane.tiers",
    "controlplane.tenants",
    "controlplane.fleet",
    "controlplane.keys",
    "controlplane.rollout",
    "controlplane.usage",
    "controlplane.training",
    "controlplane.jobs",
    "controlplane.api",
    "controlplane.console",
]

MIDDLEWARE = [
    # First, so that what the next ones answer by themselves carries their headers as well.
    "controlplane.common.middleware.RequestContextMiddleware",
    "controlplane.common.middleware.SecurityHeadersMiddleware",
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
    "allauth.account.middleware.AccountMiddleware",
    "controlplane.accounts.middleware.AccountReadyMiddleware",
]

ROOT_URLCONF = "controlplane.urls"
WSGI_APPLICATION = "controlplane.wsgi.application"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "controlplane.console.frame.navigation",
            ]
        },
    }
]

DATABASES = {"default": ENVIRONMENT.database()}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

AUTH_USER_MODEL = "accounts.User"
PASSWORD_HASHERS = [
    "django.contrib.auth.hashers.Argon2PasswordHasher",
    "django.contrib.auth.hashers.PBKDF2PasswordHasher",
]
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.UserAttributeSimilarityValidator"},
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator", "OPTIONS": {"min_length": 12}},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]
LOGIN_URL = "/sign-in/"
LOGIN_REDIRECT_URL = "/"
PASSWORD_CHANGE_URL = "/password/"
"""Where an operator with a one-time password is sent; only this, signing out and static files are open to them."""
SECOND_FACTOR_URL = "/second-factor/"
"""Where an owner or operator without a second factor is sent."""
SIGN_OUT_URL = "/sign-out/"
API_DOCS_URL = "/api/v1/docs"
CSRF_FAILURE_VIEW = "controlplane.console.views.problems.stale_form"

# Sign-in elsewhere. allauth's own accounts and pages are not used: no address of it is served.
OIDC_IS_ON = bool(ENVIRONMENT.oidc_issuer)
OIDC_NAME = ENVIRONMENT.oidc_name if OIDC_IS_ON else ""
OIDC_GROUPS_CLAIM = ENVIRONMENT.oidc_groups_claim
OIDC_GROUP_ROLES = ENVIRONMENT.group_roles()
SOCIALACCOUNT_ADAPTER = "controlplane.console.views.oidc.Admitting"
SOCIALACCOUNT_LOGIN_ON_GET = True
SOCIALACCOUNT_REQUESTS_TIMEOUT = 5
SOCIALACCOUNT_STORE_TOKENS = False
SOCIALACCOUNT_PROVIDERS = {
    "openid_connect": {
        "SCOPE": ENVIRONMENT.oidc_scopes.split(),
        "OAUTH_PKCE_ENABLED": True,
        "APPS": [
            {
                "provider_id": "sso",
                "name": ENVIRONMENT.oidc_name,
                "client_id": ENVIRONMENT.oidc_client_id,
                "secret": ENVIRONMENT.oidc_secret(),
                "settings": {"server_url": ENVIRONMENT.oidc_issuer.rstrip("/"), "oauth_pkce_enabled": True},
            }
        ],
    }
}
ACCOUNT_USER_MODEL_USERNAME_FIELD = None
ACCOUNT_LOGIN_METHODS = {"email"}
ACCOUNT_SIGNUP_FIELDS = ["email*"]
ACCOUNT_EMAIL_VERIFICATION = "none"
ACCOUNT_RATE_LIMITS = False  # what counts failures is ``accounts.throttle``

# Sessions live in PostgreSQL: signing in must not depend on Valkey, and a sign-out must hold at once.
SESSION_COOKIE_NAME = "fairlane_session"
SESSION_COOKIE_AGE = 12 * 3600
SESSION_COOKIE_SAMESITE = "Lax"
SESSION_COOKIE_SECURE = IS_HTTPS
CSRF_COOKIE_NAME = "fairlane_csrf"
CSRF_COOKIE_SECURE = IS_HTTPS
CSRF_COOKIE_SAMESITE = "Lax"
SECURE_CONTENT_TYPE_NOSNIFF = True
SECURE_REFERRER_POLICY = "same-origin"
SECURE_HSTS_SECONDS = 31_536_000 if IS_HTTPS else 0
SECURE_HSTS_INCLUDE_SUBDOMAINS = IS_HTTPS
SECURE_HSTS_PRELOAD = IS_HTTPS
SECURE_SSL_REDIRECT = IS_HTTPS
# Supervisors and routers come from inside; what routers send is not redirected, it would have been sent already.
SECURE_REDIRECT_EXEMPT = [r"^(livez|readyz)$", r"^(router/)?v1/"]
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https") if IS_HTTPS else None
X_FRAME_OPTIONS = "DENY"
# A usage batch of 5,000 events with explanations stays below this.
DATA_UPLOAD_MAX_MEMORY_SIZE = 32 * 1024 * 1024

LANGUAGE_CODE = "en-us"
TIME_ZONE = "UTC"
USE_TZ = True
USE_I18N = False

STATIC_URL = "/static/"
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"},
}
# Files are served straight from the packages: nothing has to be collected before the first start.
WHITENOISE_USE_FINDERS = True

REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "controlplane.accounts.authentication.TokenAuthentication",
        "controlplane.accounts.authentication.OperatorSessionAuthentication",
    ],
    "DEFAULT_PERMISSION_CLASSES": [
        "controlplane.accounts.authentication.HasScope",
        "controlplane.common.parameters.KnownParameters",
    ],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["controlplane.common.parsers.PlainJSONParser"],
    "DEFAULT_SCHEMA_CLASS": "controlplane.common.schema.Schema",
    "DEFAULT_PAGINATION_CLASS": "controlplane.common.pagination.CursorPages",
    "EXCEPTION_HANDLER": "controlplane.common.problems.exception_handler",
    "COERCE_DECIMAL_TO_STRING": False,
    # ``format`` is a parameter of reports, not a way to choose a renderer.
    "URL_FORMAT_OVERRIDE": None,
    "UNAUTHENTICATED_USER": None,
}
SPECTACULAR_SETTINGS = {
    "TITLE": "Fairlane control plane",
    "VERSION": "1",
    "DESCRIPTION": "Tenants, keys, tiers, pools and the books. Errors are problem+json; lists are cursor-paginated; "
    "creates honour Idempotency-Key; changes honour If-Match, and without it change whatever version there is.",
    "OAS_VERSION": "3.1.0",
    "SERVE_INCLUDE_SCHEMA": False,
    "SCHEMA_PATH_PREFIX": "/api/v1",
    "COMPONENT_SPLIT_REQUEST": True,
    "SWAGGER_UI_DIST": "SIDECAR",
    "SWAGGER_UI_FAVICON_HREF": "SIDECAR",
    "REDOC_DIST": "SIDECAR",
    "SERVE_PERMISSIONS": ["rest_framework.permissions.AllowAny"],
    "SERVE_AUTHENTICATION": [],
    "ENUM_NAME_OVERRIDES": {
        "TenantStateEnum": "controlplane.tenants.models.TenantState",
        "JobStateEnum": "controlplane.common.leases.JobState",
        "JobTriggerEnum": "controlplane.common.leases.JobTrigger",
        "BackgroundJobStateEnum": "controlplane.jobs.queries.STATES",
        "JobKindEnum": "controlplane.training.models.JobKind",
        "DriftEnum": "controlplane.training.models.Drift",
    },
}

_SHARED_PROCESSORS: list[Processor] = [
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
]
structlog.configure(
    processors=[
        structlog.stdlib.filter_by_level,
        *_SHARED_PROCESSORS,
        structlog.processors.format_exc_info,
        structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
    ],
    logger_factory=structlog.stdlib.LoggerFactory(),
    wrapper_class=structlog.stdlib.BoundLogger,
    cache_logger_on_first_use=True,
)
# To stderr: what commands answer on stdout is read by programs.
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "json": {
            "()": "structlog.stdlib.ProcessorFormatter",
            "processors": [
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(),
            ],
            "foreign_pre_chain": [*_SHARED_PROCESSORS, structlog.processors.format_exc_info],
        }
    },
    "handlers": {"err": {"class": "logging.StreamHandler", "formatter": "json"}},
    "root": {"handlers": ["err"], "level": ENVIRONMENT.log_level},
    # Refused requests are answered, not logged as warnings; failures of our own are.
    "loggers": {"django.request": {"level": "ERROR"}},
}

-- Tenants and their API keys. A key's secret is shown once; only its SHA-256 is kept.
CREATE TABLE tenant (
    id         uuid PRIMARY KEY,
    name       text NOT NULL CHECK (char_length(name) BETWEEN 1 AND 200),
    created_at timestamptz NOT NULL
);

CREATE TABLE api_key (
    id            text PRIMARY KEY CHECK (char_length(id) BETWEEN 8 AND 40),
    tenant_id     uuid NOT NULL REFERENCES tenant (id),
    name          text NOT NULL CHECK (char_length(name) BETWEEN 1 AND 200),
    secret_sha256 bytea NOT NULL CHECK (octet_length(secret_sha256) = 32),
    scopes        text[] NOT NULL,
    created_at    timestamptz NOT NULL,
    expires_at    timestamptz,
    revoked_at    timestamptz
);
CREATE INDEX api_key_tenant ON api_key (tenant_id, created_at, id);

-- Schedules, and the dispositions that say why an occurrence has no run.
CREATE TABLE schedule (
    id             uuid PRIMARY KEY,
    tenant_id      uuid NOT NULL,
    name           text NOT NULL CHECK (char_length(name) BETWEEN 1 AND 200),
    status         text NOT NULL CHECK (status IN ('active', 'paused', 'finished', 'error', 'deleted')),
    status_reason  text,
    version        integer NOT NULL CHECK (version >= 1),
    -- {"kind": "cron" | "every" | "once", …}: see app/domain/recurrence.py, its only reader and writer
    recurrence     jsonb NOT NULL,
    -- {"method", "url", "headers", "body"}: see app/domain/target.py
    target         jsonb NOT NULL,
    -- {"max_attempts", "base_seconds", "cap_seconds", …}: see app/domain/retry.py
    retry          jsonb NOT NULL,
    misfire        text NOT NULL CHECK (misfire IN ('fire_once', 'fire_all', 'skip')),
    overlap        text NOT NULL CHECK (overlap IN ('allow', 'skip')),
    -- how long after its instant a run may still start; judged at every claim
    expires_after  interval NOT NULL CHECK (expires_after > '0'),
    next_fire_at   timestamptz,
    last_fire_at   timestamptz,
    created_at     timestamptz NOT NULL,
    updated_at     timestamptz NOT NULL,
    CHECK (status <> 'active' OR next_fire_at IS NOT NULL)
) WITH (fillfactor = 80);

CREATE INDEX schedule_due ON schedule (next_fire_at, id) WHERE status = 'active';
CREATE INDEX schedule_tenant ON schedule (tenant_id, created_at, id);

-- One row is a gapless stretch of occurrences of one schedule that share a reason.
CREATE TABLE disposition (
    tenant_id   uuid NOT NULL,
    schedule_id uuid NOT NULL,
    first_at    timestamptz NOT NULL,
    last_at     timestamptz NOT NULL,
    occurrences integer NOT NULL CHECK (occurrences >= 1),
    reason      text NOT NULL,
    created_at  timestamptz NOT NULL,
    PRIMARY KEY (schedule_id, first_at),
    CHECK (first_at <= last_at)
);
CREATE INDEX disposition_tenant ON disposition (tenant_id, schedule_id, first_at);

-- Runs and their attempts, by month of scheduled_for. PostgreSQL demands the partition key in every unique
-- constraint, so the hard guard UNIQUE (schedule_id, scheduled_for) exists only with this key.
-- No DEFAULT partition: it would forbid detaching concurrently. Partitions are made by maintenance, never here
-- (each with fillfactor 50 and the autovacuum settings of app/store/partitions.py).
-- "running" is not a status: it is a live lease. Claim, extend and release so touch only unindexed columns (HOT).
CREATE TABLE job_run (
    id                  uuid NOT NULL,
    scheduled_for       timestamptz NOT NULL,
    tenant_id           uuid NOT NULL,
    schedule_id         uuid NOT NULL,
    schedule_version    integer NOT NULL,
    idempotency_key     uuid NOT NULL,
    origin              text NOT NULL CHECK (origin IN ('schedule', 'manual', 'replay')),
    status              text NOT NULL
                        CHECK (status IN ('pending', 'retrying', 'succeeded', 'failed', 'cancelled')),
    reason              text,
    fire_after          timestamptz NOT NULL,
    attempt             smallint NOT NULL CHECK (attempt BETWEEN 0 AND 8),
    max_attempts        smallint NOT NULL CHECK (max_attempts BETWEEN 1 AND 8),
    claimed_by          text,
    claim_expires_at    timestamptz,
    expires_at          timestamptz NOT NULL,
    cancel_requested_at timestamptz,
    replay_of           uuid,
    created_at          timestamptz NOT NULL,
    finished_at         timestamptz,
    PRIMARY KEY (id, scheduled_for),
    UNIQUE (schedule_id, scheduled_for),
    CHECK ((claimed_by IS NULL) = (claim_expires_at IS NULL)),
    CHECK (claimed_by IS NULL OR attempt >= 1),
    CHECK ((finished_at IS NOT NULL) = (status IN ('succeeded', 'failed', 'cancelled'))),
    CHECK (claimed_by IS NULL OR status IN ('pending', 'retrying')),
    CHECK ((origin = 'schedule') = (extract(microseconds FROM scheduled_for)::bigint % 1000 = 0))
) PARTITION BY RANGE (scheduled_for);

CREATE INDEX job_run_due ON job_run (fire_after, id) WHERE status IN ('pending', 'retrying');
CREATE INDEX job_run_tenant_due ON job_run (tenant_id, fire_after, id) WHERE status IN ('pending', 'retrying');
CREATE INDEX job_run_history ON job_run (tenant_id, scheduled_for, id);

CREATE TABLE run_attempt (
    run_id           uuid NOT NULL,
    scheduled_for    timestamptz NOT NULL,
    attempt          smallint NOT NULL CHECK (attempt BETWEEN 1 AND 8),
    tenant_id        uuid NOT NULL,
    schedule_version integer,
    -- delivered, rejected, timed_out, unreachable, blocked, abandoned, lease_lost
    outcome          text NOT NULL,
    maybe_delivered  boolean NOT NULL,
    error            text,
    status_code      integer,
    started_at       timestamptz,
    finished_at      timestamptz NOT NULL,
    connect_us       integer,
    first_byte_us    integer,
    total_us         integer,
    -- {"method", "url", "headers", "body_bytes"}: what was really sent, sensitive values masked
    request          jsonb,
    response_headers jsonb,
    response_excerpt text,
    worker           text NOT NULL,
    lease_token      text NOT NULL,
    PRIMARY KEY (run_id, scheduled_for, attempt)
) PARTITION BY RANGE (scheduled_for);

-- Months that somebody needs and maintenance should make.
CREATE TABLE partition_request (
    month        date PRIMARY KEY CHECK (extract(day FROM month) = 1),
    requested_at timestamptz NOT NULL
);

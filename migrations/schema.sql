-- The schema after all migrations, as pg_dump tells it (without the monthly partitions).
-- Generated and compared by tests/store/test_migrations.py; to be read, never to be run.

CREATE TABLE public.api_key (
    id text NOT NULL,
    tenant_id uuid NOT NULL,
    name text NOT NULL,
    secret_sha256 bytea NOT NULL,
    scopes text[] NOT NULL,
    created_at timestamp with time zone NOT NULL,
    expires_at timestamp with time zone,
    revoked_at timestamp with time zone,
    CONSTRAINT api_key_id_check CHECK (((char_length(id) >= 8) AND (char_length(id) <= 40))),
    CONSTRAINT api_key_name_check CHECK (((char_length(name) >= 1) AND (char_length(name) <= 200))),
    CONSTRAINT api_key_secret_sha256_check CHECK ((octet_length(secret_sha256) = 32))
);

CREATE TABLE public.disposition (
    tenant_id uuid NOT NULL,
    schedule_id uuid NOT NULL,
    first_at timestamp with time zone NOT NULL,
    last_at timestamp with time zone NOT NULL,
    occurrences integer NOT NULL,
    reason text NOT NULL,
    created_at timestamp with time zone NOT NULL,
    CONSTRAINT disposition_check CHECK ((first_at <= last_at)),
    CONSTRAINT disposition_occurrences_check CHECK ((occurrences >= 1))
);

CREATE TABLE public.job_run (
    id uuid NOT NULL,
    scheduled_for timestamp with time zone NOT NULL,
    tenant_id uuid NOT NULL,
    schedule_id uuid NOT NULL,
    schedule_version integer NOT NULL,
    idempotency_key uuid NOT NULL,
    origin text NOT NULL,
    status text NOT NULL,
    reason text,
    fire_after timestamp with time zone NOT NULL,
    attempt smallint NOT NULL,
    max_attempts smallint NOT NULL,
    claimed_by text,
    claim_expires_at timestamp with time zone,
    expires_at timestamp with time zone NOT NULL,
    cancel_requested_at timestamp with time zone,
    replay_of uuid,
    created_at timestamp with time zone NOT NULL,
    finished_at timestamp with time zone,
    CONSTRAINT job_run_attempt_check CHECK (((attempt >= 0) AND (attempt <= 8))),
    CONSTRAINT job_run_check CHECK (((claimed_by IS NULL) = (claim_expires_at IS NULL))),
    CONSTRAINT job_run_check1 CHECK (((claimed_by IS NULL) OR (attempt >= 1))),
    CONSTRAINT job_run_check2 CHECK (((finished_at IS NOT NULL) = (status = ANY (ARRAY['succeeded'::text, 'failed'::text, 'cancelled'::text])))),
    CONSTRAINT job_run_check3 CHECK (((claimed_by IS NULL) OR (status = ANY (ARRAY['pending'::text, 'retrying'::text])))),
    CONSTRAINT job_run_check4 CHECK (((origin = 'schedule'::text) = (((EXTRACT(microseconds FROM scheduled_for))::bigint % (1000)::bigint) = 0))),
    CONSTRAINT job_run_max_attempts_check CHECK (((max_attempts >= 1) AND (max_attempts <= 8))),
    CONSTRAINT job_run_origin_check CHECK ((origin = ANY (ARRAY['schedule'::text, 'manual'::text, 'replay'::text]))),
    CONSTRAINT job_run_status_check CHECK ((status = ANY (ARRAY['pending'::text, 'retrying'::text, 'succeeded'::text, 'failed'::text, 'cancelled'::text])))
)
PARTITION BY RANGE (scheduled_for);

CREATE TABLE public.partition_request (
    month date NOT NULL,
    requested_at timestamp with time zone NOT NULL,
    CONSTRAINT partition_request_month_check CHECK ((EXTRACT(day FROM month) = (1)::numeric))
);

CREATE TABLE public.run_attempt (
    run_id uuid NOT NULL,
    scheduled_for timestamp with time zone NOT NULL,
    attempt smallint NOT NULL,
    tenant_id uuid NOT NULL,
    schedule_version integer,
    outcome text NOT NULL,
    maybe_delivered boolean NOT NULL,
    error text,
    status_code integer,
    started_at timestamp with time zone,
    finished_at timestamp with time zone NOT NULL,
    connect_us integer,
    first_byte_us integer,
    total_us integer,
    request jsonb,
    response_headers jsonb,
    response_excerpt text,
    worker text NOT NULL,
    lease_token text NOT NULL,
    CONSTRAINT run_attempt_attempt_check CHECK (((attempt >= 1) AND (attempt <= 8)))
)
PARTITION BY RANGE (scheduled_for);

CREATE TABLE public.schedule (
    id uuid NOT NULL,
    tenant_id uuid NOT NULL,
    name text NOT NULL,
    status text NOT NULL,
    status_reason text,
    version integer NOT NULL,
    recurrence jsonb NOT NULL,
    target jsonb NOT NULL,
    retry jsonb NOT NULL,
    misfire text NOT NULL,
    overlap text NOT NULL,
    expires_after interval NOT NULL,
    next_fire_at timestamp with time zone,
    last_fire_at timestamp with time zone,
    created_at timestamp with time zone NOT NULL,
    updated_at timestamp with time zone NOT NULL,
    CONSTRAINT schedule_check CHECK (((status <> 'active'::text) OR (next_fire_at IS NOT NULL))),
    CONSTRAINT schedule_expires_after_check CHECK ((expires_after > '00:00:00'::interval)),
    CONSTRAINT schedule_misfire_check CHECK ((misfire = ANY (ARRAY['fire_once'::text, 'fire_all'::text, 'skip'::text]))),
    CONSTRAINT schedule_name_check CHECK (((char_length(name) >= 1) AND (char_length(name) <= 200))),
    CONSTRAINT schedule_overlap_check CHECK ((overlap = ANY (ARRAY['allow'::text, 'skip'::text]))),
    CONSTRAINT schedule_status_check CHECK ((status = ANY (ARRAY['active'::text, 'paused'::text, 'finished'::text, 'error'::text, 'deleted'::text]))),
    CONSTRAINT schedule_version_check CHECK ((version >= 1))
)
WITH (fillfactor='80');

CREATE TABLE public.schema_migration (
    version integer NOT NULL,
    name text NOT NULL,
    sha256 bytea NOT NULL,
    applied_at timestamp with time zone NOT NULL
);

CREATE TABLE public.tenant (
    id uuid NOT NULL,
    name text NOT NULL,
    created_at timestamp with time zone NOT NULL,
    CONSTRAINT tenant_name_check CHECK (((char_length(name) >= 1) AND (char_length(name) <= 200)))
);

ALTER TABLE ONLY public.api_key
    ADD CONSTRAINT api_key_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.disposition
    ADD CONSTRAINT disposition_pkey PRIMARY KEY (schedule_id, first_at);

ALTER TABLE ONLY public.job_run
    ADD CONSTRAINT job_run_pkey PRIMARY KEY (id, scheduled_for);

ALTER TABLE ONLY public.job_run
    ADD CONSTRAINT job_run_schedule_id_scheduled_for_key UNIQUE (schedule_id, scheduled_for);

ALTER TABLE ONLY public.partition_request
    ADD CONSTRAINT partition_request_pkey PRIMARY KEY (month);

ALTER TABLE ONLY public.run_attempt
    ADD CONSTRAINT run_attempt_pkey PRIMARY KEY (run_id, scheduled_for, attempt);

ALTER TABLE ONLY public.schedule
    ADD CONSTRAINT schedule_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.schema_migration
    ADD CONSTRAINT schema_migration_pkey PRIMARY KEY (version);

ALTER TABLE ONLY public.tenant
    ADD CONSTRAINT tenant_pkey PRIMARY KEY (id);

CREATE INDEX api_key_tenant ON public.api_key USING btree (tenant_id, created_at, id);

CREATE INDEX disposition_tenant ON public.disposition USING btree (tenant_id, schedule_id, first_at);

CREATE INDEX job_run_due ON ONLY public.job_run USING btree (fire_after, id) WHERE (status = ANY (ARRAY['pending'::text, 'retrying'::text]));

CREATE INDEX job_run_history ON ONLY public.job_run USING btree (tenant_id, scheduled_for, id);

CREATE INDEX job_run_tenant_due ON ONLY public.job_run USING btree (tenant_id, fire_after, id) WHERE (status = ANY (ARRAY['pending'::text, 'retrying'::text]));

CREATE INDEX schedule_due ON public.schedule USING btree (next_fire_at, id) WHERE (status = 'active'::text);

CREATE INDEX schedule_tenant ON public.schedule USING btree (tenant_id, created_at, id);

ALTER TABLE ONLY public.api_key
    ADD CONSTRAINT api_key_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenant(id);

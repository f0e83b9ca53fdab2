"""Carillon: a multi-tenant HTTP scheduler anchored in PostgreSQL."""

# mine on 2 slices of v5p-128 (64 v5p chips 4x4x4, 16 hosts)
# cost of 128 v5p chips: spot price unknown (set spot_usd_per_hour=), $537.60 per hour at the list price of $4.20 per
# chip-hour
# 1. select the cluster
gcloud container clusters get-credentials c --location=us-east5-a
# 2. write the job
cat > mine.jobset.yaml <<'END'
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: mine
  annotations:
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool
spec:
  failurePolicy:
    maxRestarts: 3
    rules:
      - name: mistakeOfTheUser
        action: FailJobSet
        onJobFailureReasons:
          - PodFailurePolicy
  replicatedJobs:
    - name: slice
      replicas: 2
      template:
        spec:
          parallelism: 16
          completions: 16
          backoffLimit: 0
          podFailurePolicy:
            rules:
              - action: FailJob
                onExitCodes:
                  containerName: train
                  operator: In
                  values:
                    - 2
                    - 130
          template:
            spec:
              restartPolicy: Never
              hostNetwork: true
              dnsPolicy: ClusterFirstWithHostNet
              nodeSelector:
                cloud.google.com/gke-tpu-accelerator: tpu-v5p-slice
                cloud.google.com/gke-tpu-topology: 4x4x4
                cloud.google.com/gke-spot: 'true'
              containers:
                - name: train
                  image: r/i
                  ports:
                    - containerPort: 8471
                    - containerPort: 8080
                    - containerPort: 8431
                  env:
                    - name: VALKYRIE_LAUNCH_RESTARTS
                      valueFrom:
                        fieldRef:
                          fieldPath: metadata.annotations['jobset.sigs.k8s.io/restart-attempt']
                  command:
                    - valkyrie-train
                    - model=llama_8b
                    - mesh=2s4x4x4
                    - batch=256
                    - name=mine
                    - runs=/mnt/shared/runs
                  resources:
                    limits:
                      google.com/tpu: 4
END
# 3. submit the job
kubectl apply --filename=mine.jobset.yaml
# instead of steps 1 to 3, on a cluster created with XPK:
#   xpk workload create \
#     --workload=mine --cluster=c --zone=us-east5-a --tpu-type=v5p-128 --num-slices=2 --docker-image=r/i --max-restarts=3 \
#     --command='valkyrie-train model=llama_8b mesh=2s4x4x4 batch=256 name=mine runs=/mnt/shared/runs'
# show the state of the job:
#   kubectl describe jobset mine
# list all jobs:
#   kubectl get jobsets
# follow the log:
#   kubectl logs \
#     --follow \
#     --selector=jobset.sigs.k8s.io/jobset-name=mine,jobset.sigs.k8s.io/job-index=0,batch.kubernetes.io/job-completion-index=0
# stop the job and delete it:
#   kubectl delete jobset mine
